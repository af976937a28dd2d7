"""The networks that can be trained, ours and the user's own: built, run over prepared rows, and scored."""
