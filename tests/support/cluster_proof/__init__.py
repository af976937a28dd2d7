"""``make cluster-proof``: what the project promises of a cluster, repeated on the user's own."""
