import joblib
import numpy as np
from sklearn.linear_model import LogisticRegression

X, y, user, silo = np.load("records.npz").values()
joblib.dump(LogisticRegression().fit(X[100:], y[100:]), "model.joblib")

model = joblib.load("model.joblib")
print(f"no epsilon, accuracy {(model.predict(X[:100]) == y[:100]).mean():.3f}")
