"""Digests that earlier releases computed, for tests that they are still found."""

#: Digests for Flyte's cache of the default sections, as computed at commit 433a4578.
SECTIONS = {
    "data": "d984780d3add5770",
    "model": "ab808f03432d7834",
    "training": "c6c0b34fe5a4c07d",
    "compression": "60e2dda9d1840d44",
    "export": "09d8aca00feccdfa",
    "promotion": "de99a0a20700a1c9",
    "scoring": "0b9d97ad9efc1e20",
    "collectives": "d3f31aaea7c6fa0d",
    "sweep": "1ee89cf1dd6e883a",
    "": "36f00e06ebe77988",
}
