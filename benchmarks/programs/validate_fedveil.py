import numpy as np

import fedveil as fv

X, y, user, silo = np.load("records.npz").values()
people = fv.population(
    X, y, user=user, silo=silo, n_users=100, silos=[0, 1, 2], task="classification", classes=[0, 1]
)
found = fv.cross_validate("linear", people, folds=3, epsilon=4.0, delta=1e-4, metrics=["accuracy"])
print(found)
