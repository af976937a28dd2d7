"""How fast training is: throughput, floating-point operations, and a profile of steps."""
