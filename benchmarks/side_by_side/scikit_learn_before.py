"""Logistic regression on all examples together: one score."""

from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

x, y = load_digits(return_X_y=True)
x_train, x_test, y_train, y_test = train_test_split(x / 16, y, test_size=0.25, random_state=0)
model = LogisticRegression(max_iter=500).fit(x_train, y_train)
print(f"error {1 - model.score(x_test, y_test):.3f}")
