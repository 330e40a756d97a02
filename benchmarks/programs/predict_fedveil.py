import numpy as np

import fedveil as fv

X, y, user, silo = np.load("records.npz").values()
people = fv.population(
    X[100:],
    y[100:],
    user=user[100:],
    silo=silo[100:],
    n_users=100,
    silos=[0, 1, 2],
    task="classification",
    classes=[0, 1],
)
fv.train("linear", people, epsilon=4.0, delta=1e-4).save("model.zip")

bundle = fv.load("model.zip")
print(bundle.statement.summary(), f"accuracy {(bundle.predict(X[:100]) == y[:100]).mean():.3f}")
