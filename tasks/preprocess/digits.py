"""The handwritten digits that ship with scikit-learn: 1,797 real scans of 8 x 8 pixels, the default data."""

from __future__ import annotations

import numpy as np


def load() -> tuple[np.ndarray, np.ndarray]:
    """Pixels (uint8 ``[1797, 1, 8, 8]``, 0 to 16) and labels (int32 ``[1797]``, 0 to 9).

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998, CC BY 4.0.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.images.astype(np.uint8)[:, None], digits.target.astype(np.int32)
