"""Non-inferiority tests of one model against another on the same rows, with confidence limits."""
