"""The only folder of this package that imports flytekit."""
