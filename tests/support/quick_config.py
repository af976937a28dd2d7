"""Settings for the shortest measurements."""

EXPORT = {"seconds": 1}
NETWORK = {
    "operations": ["all_reduce"],
    "smallest": 1024,
    "largest": 4096,
    "budget": 0.001,
    "launches": 1,
    "pairs": False,
    "overlap": False,
}
