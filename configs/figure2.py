"""The training behind Figure 2: SmallMLP without BatchNorm, SGD, all training data
but the 5,000 examples held out for validation.

    python -m mass_jax.main --config=configs/figure2.py --config.seed=0
    python -m mass_jax.main --config=configs/figure2.py --config.method=softmax_ce --config.beta=0

Cost: 10 to 30 (SoftmaxCE) and 25 to 55 minutes (MASS) on one CPU core, by the machine.
Expected: the three loss terms differ between the two methods although their accuracies
are alike (arXiv:1905.07822, Figure 2; 5 seeds, terms every 500 steps).
"""

from ml_collections import ConfigDict

from configs import cifar10


def get_config() -> ConfigDict:
    config = cifar10.small_mlp("mass", beta=1e-3)
    config.batch_norm = False
    config.representation_dim = 10
    config.num_components = 2
    config.initialisation = "zeros"
    config.steps = 50_000
    config.train_size = 45_000
    config.optimizer.name = "sgd"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.q_learning_rate = None
    config.eval_every = 500
    return config
