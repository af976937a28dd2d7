"""Work around the pipeline: plans, cluster objects, diagnosis and proofs."""
