"""Parameters that mean the same in many places: what they are, and the public names of which it is true.

A description here is used where neither the docstring of a name nor a comment at the parameter says what it is. Names may
hold `*`. A parameter that means another thing elsewhere has a second description with other names.
"""

_TRAIN = ("equipoise.train", "equipoise.train_many", "equipoise.train_family", "equipoise.compare", "equipoise.tune")
_JUDGE = (*_TRAIN, "equipoise.evaluate", "equipoise.explain", "equipoise.heterogeneity.*", "equipoise.conformal.*")
_SETS = ("equipoise.ClientSet", "equipoise.data.ClientSet", "equipoise.data.to_clients", "equipoise.data.partition.to_clients")
_FROM = ("equipoise.data.from_*", "equipoise.data.npz", *_SETS)
_HELD = ("equipoise.FederatedData", "equipoise.data.FederatedData")
_FILES = ("equipoise.data.csv", "equipoise.data.parquet")
_STORES = ("equipoise.data.write_store", "equipoise.data.write_table_store", "equipoise.data.open_store",
           "equipoise.data.check_store")  # fmt: skip
_DATA = ("equipoise.data.*",)
_TAIL = ("equipoise.risk.measures.*",)
_TESTING = ("equipoise.testing.*",)
_TILTED = ("equipoise.tilted.*",)
_DESCENT = ("equipoise.tilted.*descent",)
_ESTIMATORS = ("equipoise.tilted.TiltedLinearRegression", "equipoise.tilted.TiltedLogisticRegression", "equipoise.tilted.TiltedSVC",
               "equipoise.tilted.FairPCA")  # fmt: skip
_OPTIM = ("equipoise.optim.*",)

# Names whose docstrings are long: their list of parameters repeats what each parameter is, for readers who look one up.
LISTED = (*_TRAIN, "equipoise.evaluate", "equipoise.explain")

COMMON: dict[str, dict[str, tuple[str, ...]]] = {
    # Runs
    "model": {
        "The torch module that is trained, or a function of the seed that makes one. It is not changed.": _TRAIN,
        "The torch module that is judged. It is not changed.": _JUDGE,
        "The torch module that is trained, in place.": _OPTIM,
        "The torch module that is copied. It is not changed.": ("equipoise.models.*",),
    },
    "data": {
        "The clients to train on, and those to validate and test on: a `FederatedData`, or a function of the seed that makes"
        " one.": _TRAIN,
        "A `FederatedData`, or a `ClientSet`, whose clients are then the split of test clients.": ("equipoise.evaluate",),
        "The federated data.": (*_JUDGE, "equipoise.attacks.*", *_DATA),
        "The data on which it is checked (None: small data that the check makes).": _TESTING,
    },
    "algorithm": {
        "What is minimised, and how (None: FedAvg).": ("equipoise.train", "equipoise.explain", "equipoise.heterogeneity.*"),
        "The other parts, and the other options of the risk (None: those of FedAvg).": ("equipoise.train_family",),
        "A function of the names in `space` that makes an Algorithm.": ("equipoise.tune",),
    },
    "rounds": {
        "How many rounds of communication a run has.": _TRAIN,
        "How many rounds the noise is for, T.": ("equipoise.privacy.*",),
        "How many rounds are tried.": _TESTING,
    },
    "clients_per_round": {
        "How many clients the round has (None: up to 20).": ("equipoise.explain",),
        "How many clients are drawn in each round, on average for Poisson sampling (None: `sampling.Full()` takes all).": _TRAIN,
        "How many clients a round asks for.": _TESTING,
    },
    "seeds": {"The seeds: a number n means 0 … n − 1.": _TRAIN},
    "seed": {
        "Fixes cohorts, batches and noise, whatever the engine.": _TRAIN,
        "Fixes the random choices: other clients, examples or splits for another seed.": _DATA,
        "Fixes the random cases that are tried.": _TESTING,
        "Fixes the initial parameters.": ("equipoise.models.*",),
        "Fixes which clients are malicious, and the noise of the attack.": ("equipoise.attacks.*",),
        "Fixes which examples are drawn.": (*_DESCENT, "equipoise.optim.poisson_batches", "equipoise.optim.set_aside"),
        "Fixes the noise.": ("equipoise.privacy.*",),
    },
    "loss": {"A function of (outputs, targets) that gives the loss of each example, (B,). None: the model's own `loss`, else"
             " cross-entropy.": (*_JUDGE, *_OPTIM)},
    "error": {"A function of (outputs, targets) that gives the error of each example, (B,). None: the model's own `error`, else"
              " misclassification where there are classes, or the loss.": _JUDGE},
    "engine": {
        'Where clients\' work is done: "simulator", "loop", or an engine with options such as'
        ' `engines.Simulator(device="cuda")`.': _JUDGE,
        "The engine that is checked, or on which the part is checked.": _TESTING,
    },
    "metrics": {"Further figures of each client by name: functions of (outputs, targets) of all its examples.": _JUDGE},
    "evaluate_every": {"The number of rounds from one evaluation of all clients to the next (None: at the end only).": _TRAIN},
    "evaluate_clients": {"How many clients of each split are evaluated, a random sample (None: all).": _JUDGE},
    "observers": {"Objects that are told about the run while it goes on (`equipoise.observers`).": _TRAIN},
    "progress": {"Whether to show a bar (None: in a terminal).": (*_TRAIN, "equipoise.observers.*")},
    "checkpoint": {"The file from which a run continues after a break, or a `Checkpoints`.": _TRAIN},
    "ledger": {"The file that every private release is written to before it is made (None: beside the checkpoint, or in"
               " memory).": _TRAIN},
    "stop": {"The `EarlyStopping` that ends a run when a figure no longer improves, and reports the best iterate.": _TRAIN},
    "algorithms": {"The algorithm, or several by name (None: FedAvg).": ("equipoise.train_many",)},
    "methods": {"The algorithms by the names that tables show.": ("equipoise.compare",)},
    "space": {"The values of each name that `algorithm` takes; they may be parts.": ("equipoise.tune",)},
    "criterion": {'"validation_90", the 90th percentile of the error over validation clients, or another criterion of a search.': ("equipoise.tune",)},
    "trials": {"How many times Optuna chooses values (None: all combinations are tried).": ("equipoise.tune",)},
    "at_least": {"How many validation examples a client must have to be judged by.": ("equipoise.tune",)},
    "tails": {"The tails of the family, shares in (0, 1].": ("equipoise.train_family",)},
    "qs": {"The values of q of the family.": ("equipoise.train_family",)},
    "tilts": {"The tilts of the family.": ("equipoise.train_family",)},
    # Data
    "ids": {
        "The name of each client, n in all.": _SETS,
        "The id of the client of each row, (N,).": ("equipoise.data.partition.by_id",),
    },
    "name": {
        "The name of the data in reports.": (*_DATA, *_HELD),
        "The name of the run or model in reports.": ("equipoise.train", "equipoise.evaluate"),
        "The name that was given.": ("equipoise.errors.*",),
    },
    "x": {
        "The inputs (N, …), one row per example.": ("equipoise.data.from_arrays", *_SETS, *_OPTIM),
        "The name of the column that holds the inputs, or several names.": ("equipoise.data.from_partitions",),
        "The name of the array of inputs in the file.": ("equipoise.data.npz",),
        "The inputs (N, F).": ("equipoise.data.tabular.Table",),
    },
    "y": {
        "The targets (N, …), one row per example.": ("equipoise.data.from_arrays", *_SETS, *_OPTIM),
        "The name of the column that holds the targets.": ("equipoise.data.from_partitions",),
        "The name of the array of targets in the file.": ("equipoise.data.npz",),
        "The targets (N,).": ("equipoise.data.tabular.Table",),
    },
    "client": {
        "The name of the column that says whose row it is.": (*_FILES, "equipoise.data.write_table_store"),
        "The name of the array of client ids in the file, (N,).": ("equipoise.data.npz",),
    },
    "target": {"The name of the column to predict.": (*_FILES, "equipoise.data.write_table_store")},
    "clients": {
        "How many clients there are, n.": ("equipoise.data.digits", "equipoise.data.synthetic", "equipoise.data.fashion_mnist",
                                           "equipoise.data.partition.*", *_TESTING),
        "The clients that are split.": ("equipoise.data.split_*",),
        "One pair (x, y) of arrays by client id: (n_k, …) each.": ("equipoise.data.from_dict",),
        "The clients of whom a share is malicious.": ("equipoise.attacks.malicious_clients",),
        "How many clients the scores are from, K.": ("equipoise.conformal.*",),
        "The table of clients.": ("equipoise.observers.error_histogram",),
    },
    "split_by": {'"clients" keeps whole clients apart for validation and test; "examples" keeps a share of each client\'s examples'
                 " apart.": _DATA},
    "validation": {
        "The clients, or the further examples of the training clients, by which parameters are chosen.": _HELD,
        "The share that is kept apart for validation: of the clients, or of each client's examples, in the way the data are"
        " split.": _DATA,
    },
    "train": {"The clients to train on.": _HELD},
    "test": {"The share that is kept apart for the test: of the clients, or of each client's examples, in the way the data are"
             " split.": _DATA},
    "scale": {"The factor by which raw numbers are multiplied when a batch is gathered, e.g. 1/255 for bytes (None: none).": _FROM},
    "shift": {"The number that is added to raw numbers after `scale`.": _FROM},
    "classes": {
        "How many classes there are (0: as many as the targets show).": _DATA,
        "How many classes there are, C.": ("equipoise.models.*",),
    },
    "ignore_index": {"The class of places that count neither in losses nor in errors, such as padding.": _DATA},
    "folder": {
        "The folder that holds the file (None: the one that the environment variable EQUIPOISE_DATA names).": _DATA,
        "The folder of the log.": ("equipoise.tracking.*",),
        "The folder that keeps a checkpoint of each run; the same call continues the search.": ("equipoise.tune",),
    },
    "path": {
        "The folder of the store.": _STORES,
        "The file, or for Parquet also a folder of files.": _FILES,
        "The file.": ("equipoise.data.npz", "equipoise.observers.*", "equipoise.Checkpoints"),
        "The folder that holds the folders of the clients.": ("equipoise.data.from_folders",),
    },
    "options": {
        "Further options, those of `train`.": ("equipoise.compare", "equipoise.tune"),
        "Further options, those of `from_frame`.": _FILES,
        "Further options, those of `from_arrays`.": ("equipoise.data.from_hugging_face", "equipoise.data.from_partitions"),
        "Further options, those of `from_dict`.": ("equipoise.data.from_datasets", "equipoise.data.from_folders"),
    },
    "source": {"A name for where the clients are from.": (*_SETS, "equipoise.data.from_texts")},
    "encoding": {"The encoding of the file's text.": _DATA},
    "append": {"Whether clients are added to a store that is there.": _STORES},
    "assignment": {"The row numbers of each client: one int64 tensor (n_k,) per client.": _SETS},
    "labels": {"The class of each example, (N,) int64.": ("equipoise.data.partition.*",)},
    "exponent": {"The exponent of the power law; larger means that sizes differ more.": ("equipoise.data.partition.*",)},
    "allow_empty": {"Whether a client may stay without examples.": ("equipoise.data.partition.*",)},
    # Models
    "features": {"How many numbers an input has, F.": ("equipoise.models.*", "equipoise.data.synthetic")},
    "layers": {"How many recurrent layers there are.": ("equipoise.models.*",)},
    "bias": {"Whether there is an intercept b.": ("equipoise.models.*",)},
    "outputs": {"The outputs of the model: logits (B, T, V), or an object with such `logits`.": ("equipoise.models.language.*",)},
    "targets": {"The tokens themselves, (B, T) int64; −100 is not predicted.": ("equipoise.models.language.*",)},
    # Numbers over clients
    "values": {"One value per client, (n,).": ("equipoise.metrics.*",)},
    "weights": {
        "The weight of each client, (n,); they need not sum to 1 (None: equal).": ("equipoise.metrics.*",),
        "The weight of each loss, (n,) (None: equal).": _TAIL,
    },
    "sizes": {"How many examples each client has, (n,).": ("equipoise.metrics.*",)},
    "percent": {"p, from 0 to 100.": ("equipoise.metrics.*",)},
    "higher_is_better": {"Whether more is better; the worst clients are then at the low end.": ("equipoise.metrics.*",)},
    "losses": {
        "The losses, (n,).": _TAIL,
        "The loss of each example, (N,).": ("equipoise.tilted.tilted_*", "equipoise.tilted.superquantile_loss"),
        "`losses(θ, index)` gives the losses (B,) of the examples `index` (B,) at the parameters θ (D,).": (
            "equipoise.tilted.hierarchical_stochastic_descent",),
    },
    "tail": {"The share α of the worst losses, in (0, 1].": (*_TAIL, *_TILTED)},
    "miss": {"ζ, the share of test points that may be missed.": ("equipoise.conformal.*",)},
    # Parts
    "batch_size": {
        "How many examples a local step sees (None: all of the client's).": ("equipoise.solvers.*",),
        "How many examples a step sees.": _DESCENT,
    },
    "epochs": {"How many passes over its examples a client makes in a round.": ("equipoise.solvers.*",)},
    "steps": {
        "How many local steps a client makes in a round, in place of `epochs` (None: by epochs).": ("equipoise.solvers.*",),
        "How many steps are made.": (*_DESCENT, *_OPTIM),
    },
    "malicious": {"How many malicious clients a round is to withstand, f.": ("equipoise.aggregators.*",)},
    "share": {"The share of the training clients that are malicious.": ("equipoise.attacks.*",)},
    "lr": {
        "The learning rate of the server, η.": ("equipoise.server_opt.*",),
        "The learning rate, or a function of the step, counted from 0.": (*_OPTIM, *_DESCENT),
    },
    "privacy": {"`clip`, `noise_multiplier`, `sample_rate` and the other options of `PrivateOptimizer`.": _OPTIM},
    "public_batch_size": {"How many public examples a step sees (None: all).": ("equipoise.optim.*",)},
    # Checks of parts
    "aggregator": {"The aggregator that is checked.": _TESTING},
    "attack": {
        "The attack that is checked.": _TESTING,
        "The attack that the malicious clients carry out.": ("equipoise.attacks.apply", *_HELD),
    },
    "averaging": {"The averaging that is checked.": _TESTING},
    "rule": {"The clipping rule that is checked.": _TESTING,
             'What a value must be, in words such as "must be positive".': ("equipoise.errors.*",)},
    "observer": {"The observer that is checked.": _TESTING},
    "sampler": {"The sampler that is checked.": _TESTING},
    "schedule": {"The schedule that is checked.": _TESTING},
    "server": {"The server optimiser that is checked.": _TESTING},
    "solver": {"The solver that is checked.": _TESTING, "The solver of the clients' local work.": ("equipoise.heterogeneity.*",)},
    "task": {"The model with its loss and error (None: a small task that the check makes).": _TESTING},
    "engines": {"The engines that must agree with the loop engine.": _TESTING},
    "tolerance": {"The largest difference that counts as rounding, in units of max(1, the largest number).": _TESTING},
    # Errors
    "parameter": {"The name of the parameter, as the user writes it.": ("equipoise.errors.*",)},
    "value": {"The value that was given.": ("equipoise.errors.*",)},
    "fix": {"What to do instead, a sentence; empty if that is clear.": ("equipoise.errors.*",)},
    "allowed": {"The names that are allowed.": ("equipoise.errors.*",)},
    # Tilted risk in one place
    "tilt": {"The tilt t: positive leans towards large losses, negative away from them, 0 is the mean.": _TILTED},
    "inner_tilt": {"The tilt τ inside groups, or one for each inner level.": _TILTED},
    "groups": {"The group of each example, (N,).": _TILTED},
    "sample_weight": {"The weight of each example, (N,) (None: equal).": _TILTED},
    "start": {"The parameters at the start, θ (D,). It is not changed.": _DESCENT},
    "anneal": {
        "Over which share of the steps the tilt grows from 0 (None: half if a tilt is negative, else at once).": _DESCENT,
        "Whether the fit is annealed, e.g. a negative tilt followed from 0; if not, it starts at zeros.": _ESTIMATORS,
    },
    "risk": {'"tilted", or "superquantile" for the mean of the worst share `tail`.': _ESTIMATORS},
    "alpha": {"The strength of the L2 penalty; the intercept is free.": _ESTIMATORS},
    "fit_intercept": {"Whether there is an intercept b.": _ESTIMATORS},
    "warm_start": {"Whether a fit starts at the last one.": _ESTIMATORS},
    "tol": {"The largest slope at the solution, in coordinates in which data have unit spread.": _ESTIMATORS},
    "max_iter": {"The largest number of iterations; a warning says if they do not suffice.": _ESTIMATORS},
    "rho": {"How fast the tracked risk follows the batches, in (0, 1].": _TILTED},
}  # fmt: skip
