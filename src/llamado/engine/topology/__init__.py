"""The machines a model is divided among: their state, and changes of membership and layout."""
