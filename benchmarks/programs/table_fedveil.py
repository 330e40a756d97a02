import pandas as pd

import fedveil as fv

table = pd.read_csv("table.csv")
people = fv.population(
    table[["age", "pressure", "sugar"]],
    table["ill"],
    user=table["patient"],
    silo=table["hospital"],
    n_users=100,
    silos=["north", "south", "west"],
    task="classification",
    classes=[0, 1],
)
method = fv.uldp_avg_w(clip=0.5, epochs=5)
result = fv.train("linear", people, method=method, epsilon=4.0, delta=1e-4, rounds=10, server=fv.Sgd(2.0))
print(result.statement.sentences()[0], result.metrics)
