"""``slipstream rehearse``: a profile made small, its workflow in three acts, and the page of what happened."""
