"""Whether it is shown that one model loses no more against another than it may: on the same rows, with limits."""
