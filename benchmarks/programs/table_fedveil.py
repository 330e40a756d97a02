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
result = fv.train("linear", people, epsilon=4.0, delta=1e-4)
print(result.statement.sentences()[0], result.metrics)
