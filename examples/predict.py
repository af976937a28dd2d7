"""Prediction for the rows of a CSV: ``python examples/predict.py runs/… rows.csv``."""

import sys

import pandas as pd

import slipstream

model = slipstream.load(sys.argv[1])
print(model.predict(pd.read_csv(sys.argv[2])))
