"""``slipstream cluster-proof``: the project's promises about clusters, tested on the user's own cluster."""
