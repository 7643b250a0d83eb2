"""Recurrent states: the pools that hold them, and what a mode keeps of draft nodes between verify and commit."""
