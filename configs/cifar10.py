"""What all CIFAR-10 experiments of the paper share (not an experiment itself).

Section 5 and supplement of arXiv:1905.07822: SVHN is the out-of-distribution set,
5,000 training images are held out for validation, no augmentation.
"""

from ml_collections import ConfigDict

from configs import base


def small_mlp(method: str, beta: float) -> ConfigDict:
    """SmallMLP: Adam at 5e-4 for 100,000 steps of 256 examples."""
    config = _cifar10(method, beta)
    config.network = "small_mlp"
    config.steps = 100_000
    config.batch_size = 256
    config.representation_dim = 15
    config.initialisation = "random"
    config.optimizer.name = "adam"
    config.optimizer.learning_rate = 5e-4
    if method == "mass":
        config.optimizer.q_learning_rate = 2.5e-5
    config.vib.covariance = "full"
    config.vib.train_samples = 5
    config.vib.test_samples = 10
    config.steps_per_dispatch = 20
    return config


def resnet20(method: str, beta: float) -> ConfigDict:
    """ResNet20: SGD at 0.1, times 0.1 at epochs 100 and 150, for 70,000 steps of 128."""
    config = _cifar10(method, beta)
    config.network = "resnet20"
    config.steps = 70_000
    config.batch_size = 128
    config.representation_dim = 20
    config.initialisation = "zeros"
    config.optimizer.name = "sgd"
    config.optimizer.learning_rate = 0.1
    config.optimizer.decay_epochs = (100, 150)
    config.vib.covariance = "diagonal"
    config.vib.train_samples = 10
    config.vib.test_samples = 20
    config.steps_per_dispatch = 1
    return config


def _cifar10(method: str, beta: float) -> ConfigDict:
    config = base.get_config()
    config.method = method
    config.beta = beta
    config.train_size = 40_000
    config.num_components = 10
    config.data.name = "cifar10"
    config.data.ood = ("svhn_cropped",)
    config.data.validation_size = 5_000
    config.optimizer.q_learning_rate = None
    config.optimizer.decay_epochs = ()
    # Like for like with the authors; "frozen" is the per-example definition.
    config.jacobian.batch_stats = "paper"
    config.log_every = 100
    config.eval_every = 5_000
    config.checkpoint_every = 1_000
    return config
