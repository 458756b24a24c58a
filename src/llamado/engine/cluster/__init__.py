"""The machines a model is divided among: who watches them, and who comes and goes."""
