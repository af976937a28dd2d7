"""Networks, built in or the user's own: how they are built, run over prepared rows, scored and stored."""
