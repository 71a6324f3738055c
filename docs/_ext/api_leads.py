"""For whom each page of the API is, and what its reader can do afterwards; and the groups of the long pages."""

GOAL = "After this page you"  # every generated page has these words in its first lines

LEADS = {
    "equipoise": "For people who train and compare models in Python. {goal} know every option of a run, and what its result holds.",
    "equipoise.aggregators": "For people who choose how updates are combined, or defend against malicious clients. {goal} know the"
    " rule and the parameters of every aggregator.",
    "equipoise.attacks": "For people who test defences. {goal} can make clients malicious, and know what each attack sends.",
    "equipoise.averaging": "For people who report a mean of the iterates. {goal} can choose which mean a run reports and serves.",
    "equipoise.conformal": "For people who need sets of classes instead of one. {goal} can calibrate such sets, and measure their"
    " coverage for each client.",
    "equipoise.data": "For people who bring data to a run. {goal} know which function reads, generates or splits your data.",
    "equipoise.data.partition": "For people who deal one data set out to clients. {goal} can choose how clients differ.",
    "equipoise.data.tabular": "For people who train one model on a table, without clients. {goal} can load these tables.",
    "equipoise.engines": "For people who choose where clients' work is done. {goal} know the options of each engine.",
    "equipoise.engines.flower": "For people who run a federation with Flower. {goal} can make its server app and client app.",
    "equipoise.errors": "For people who handle errors, or check the parameters of a part of their own. {goal} know which exception"
    " is raised when, and how a part raises it.",
    "equipoise.heterogeneity": "For people who ask how far clients are from each other. {goal} can measure it during a run.",
    "equipoise.metrics": "For people who summarise figures of clients. {goal} know the formula of every figure in tables and"
    " reports.",
    "equipoise.models": "For people who need a model. {goal} know the models of the papers, their shapes and parameters.",
    "equipoise.models.language": "For people who train a language model. {goal} can give a run its loss, error and perplexity.",
    "equipoise.observers": "For people who watch runs. {goal} can log rounds to a file, and read the history of a run.",
    "equipoise.optim": "For people who train one model with differential privacy. {goal} can choose a private optimiser.",
    "equipoise.personal": "For people who give every client a model of its own. {goal} know what each method trains and shares.",
    "equipoise.privacy": "For people who protect clients. {goal} know what each mechanism hides, and what it costs.",
    "equipoise.privacy.correlated_noise": "For people who study DP-FTRL. {goal} can compute its matrices, sensitivities and noise.",
    "equipoise.risk": "For people who choose how clients are weighed. {goal} know the formula and parameters of every risk.",
    "equipoise.risk.measures": "For people who measure the tail of a loss vector. {goal} can compute four measures of it.",
    "equipoise.sampling": "For people who choose who takes part in a round. {goal} know how each sampler draws a cohort.",
    "equipoise.server_opt": "For people who choose how the server moves the parameters. {goal} know every rule and its parameters.",
    "equipoise.solvers": "For people who choose what a client does in a round. {goal} know every solver and its parameters.",
    "equipoise.testing": "For people who write parts. {goal} can check a part of your own against the laws of its kind.",
    "equipoise.tilted": "For people who train one model without a federation. {goal} can use tilted losses in PyTorch and"
    " scikit-learn.",
    "equipoise.tracking": "For people who keep runs in another tool. {goal} can send curves to TensorBoard, MLflow or W&B.",
    "equipoise.types": "For people who write parts. {goal} know what a part of each kind must offer, and what it may offer.",
}

# Module → heading → names, in the order of the page. A name that is in no group comes last, under `Other names`.
GROUPS = {
    "equipoise": {
        "Train": ("train", "train_many", "train_family", "Algorithm", "EarlyStopping", "Checkpoints"),
        "Compare, search and evaluate": ("compare", "tune", "evaluate", "explain"),
        "Results": ("Result", "EvaluatedModel", "Comparison", "Family", "Tuning", "ClientTable", "read_personal_models"),
        "Data": ("ClientSet", "FederatedData"),
    },
    "equipoise.data": {
        "What federated data are": ("FederatedData", "ClientSet", "Ragged", "Schema", "WordVectors"),
        "From your own data": ("from_arrays", "from_dict", "from_datasets", "from_folders", "from_frame", "from_hugging_face",
                               "from_partitions", "from_texts"),
        "From files": ("csv", "parquet", "npz", "leaf"),
        "Data sets": ("digits", "texts", "adult", "fashion_mnist", "femnist", "imdb", "glove", "mocha", "omniglot", "shakespeare",
                      "vehicle"),
        "Generators": ("label_shift", "synthetic", "gaussian_means"),
        "Splits": ("split_clients", "split_examples", "to_clients"),
        "Stores larger than memory": ("open_store", "write_store", "write_table_store", "check_store", "refuse_changed_store"),
    },
}  # fmt: skip


def lead(module: str) -> str:
    """The first lines of the page of a module."""
    return LEADS[module].format(goal=GOAL)


def grouped(module: str, names: list[str]) -> dict[str, list[str]]:
    """Heading → names of a page; one heading "" where a page has no groups."""
    groups = GROUPS.get(module)
    if groups is None:
        return {"": names}
    found = {heading: [name for name in group if name in names] for heading, group in groups.items()}
    rest = [name for name in names if not any(name in group for group in groups.values())]
    return found | ({"Other names": rest} if rest else {})
