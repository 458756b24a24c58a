"""`llamado doctor`: find problems of servers, workers, model files and this machine, with causes and fixes."""
