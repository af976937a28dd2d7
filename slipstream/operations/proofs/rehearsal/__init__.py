"""``slipstream rehearse``: a small propeller and training operator that run a package's pods on this machine.

Every rule is one of Flyte v1.16.8 or training-operator v1.9.0, named where it is imitated. A pod is a process with only
a cluster's environment, command and files. All data is on S3.
"""
