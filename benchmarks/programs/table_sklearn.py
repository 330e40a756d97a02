import pandas as pd
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

table = pd.read_csv("table.csv")
train, test = train_test_split(table, test_size=0.2)
columns = ["age", "pressure", "sugar"]
model = LogisticRegression().fit(train[columns], train["ill"])
print(f"no epsilon, accuracy {model.score(test[columns], test['ill']):.3f}")
