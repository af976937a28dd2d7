"""``slipstream rehearse``: a profile made small, its workflow in three acts, and a page of the events."""
