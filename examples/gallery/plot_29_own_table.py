"""
Your own table: which groups are left behind?
=============================================

A table becomes a federation if one of its columns names the client of each row. This table is synthetic. It has visits
of 40 hospitals, with a category and missing values. The rows of a few hospitals follow another rule.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import equipoise as eq

rng = np.random.default_rng(0)
hospital = rng.integers(0, 40, 6000)
age, ward = rng.uniform(20, 90, 6000), rng.choice(["A", "B", "C"], 6000)
odd = hospital >= 34
risk = (age - 55) / 15 + (ward == "B") * np.where(odd, -4.0, 2.0)
visits = pd.DataFrame({"hospital": hospital, "age": np.where(rng.random(6000) < 0.1, np.nan, age), "ward": ward,
                       "readmitted": np.where(risk + rng.logistic(size=6000) > 0, "yes", "no")})  # fmt: skip
data = eq.data.from_frame(visits, client="hospital", target="readmitted", split_by="examples", test=0.3, seed=0)
model = eq.models.Tabular(data.schema)
result = eq.train(model, data, rounds=40, clients_per_round=20, seed=0)
table = result.clients.where("test")

# %%
# Every bar is a hospital. The hospitals with another rule are among the worst. The mean does not show this.

order = np.argsort(-np.asarray(table.error))
names = np.array(table.client)[order]
colours = ["C1" if int(float(name)) >= 34 else "C0" for name in names]
plt.bar(range(len(names)), 100 * np.asarray(table.error)[order], color=colours)
plt.axhline(100 * float(table.error.mean()), color="black", ls="--", label=f"mean {100 * float(table.error.mean()):.0f} %")
plt.bar(0, 0, color="C1", label="hospitals with another rule")
plt.xlabel("hospitals, the worst first")
plt.ylabel("test error in %")
plt.legend()
plt.show()
