"""The schema of configurations: what is accepted, what is refused, and how it is said."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mass_jax import config as configuration
from mass_jax.config import SCHEMA, ConfigError, apply_overrides, default_config, resolve
from mass_jax.config_checks import checked_value
from mass_jax.options import CONFIG_DIR, load_config, parse

CONFIG_FILES = sorted(
    path for path in CONFIG_DIR.glob("*.py") if path.stem not in ("__init__", "base", "cifar10")
)


def resolved(**overrides):
    overrides = {key.replace("__", "."): value for key, value in overrides.items()}
    return resolve(apply_overrides(default_config(), overrides))


@pytest.mark.parametrize("path", CONFIG_FILES, ids=lambda path: path.stem)
def test_every_config_file_resolves_and_names_its_command(path):
    """Oracle: the file's own docstring, which must hold the command that runs it."""
    resolve(load_config(str(path)))
    text = path.read_text()
    assert f"--config=configs/{path.name}" in text
    assert "Cost:" in text
    assert "Expected:" in text


def test_the_papers_hyperparameters():
    """Oracle: arXiv:1905.07822, supplement "Experiment Details"."""
    mlp = resolve(load_config(str(CONFIG_DIR / "mass_small_mlp.py")))
    assert (mlp.steps, mlp.batch_size, mlp.representation_dim) == (100_000, 256, 15)
    assert (mlp.optimizer.learning_rate, mlp.optimizer.q_learning_rate) == (5e-4, 2.5e-5)
    resnet = resolve(load_config(str(CONFIG_DIR / "vib_resnet20.py")))
    assert (resnet.steps, resnet.batch_size, resnet.representation_dim) == (70_000, 128, 20)
    assert (resnet.optimizer.learning_rate, resnet.optimizer.momentum) == (0.1, 0.9)
    assert tuple(resnet.optimizer.decay_epochs) == (100, 150)
    assert (resnet.vib.train_samples, resnet.vib.test_samples) == (10, 20)


def good_text(key, field, draw):
    """A valid text for a field, made from the schema."""
    if field.choices:
        return draw(st.sampled_from(field.choices))
    if field.kind is bool:
        return draw(st.sampled_from(["true", "false", "True", "0"]))
    low = field.low + (1 if field.positive and field.kind is int and field.low == 0 else 0)
    high = min(field.high, 10**6)
    if field.kind is int:
        return str(draw(st.integers(int(low), int(high))))
    if field.kind is float:
        return repr(draw(st.floats(max(low, 1e-6 if field.positive else low), high)))
    return {"ints": "(100, 150)", "strs": "svhn_cropped", str: "cifar10"}[field.kind]


def bad_texts(field):
    """Texts a field must refuse, made from the schema."""
    if field.choices:
        texts = ["nonsense", field.choices[0] + "x"]
        return texts if field.optional else [*texts, "", "None"]
    if field.kind is bool:
        texts = ["maybe", "2", "nan"]
        return texts if field.optional else [*texts, "", "None"]
    if field.kind is str:
        return [] if field.optional else [""]
    if field.kind == "strs":
        return []
    if field.kind == "ints":
        return ["a", "0", "(1, 1.5)", "-3", "(1,", "__import__('os')"]
    texts = ["abc", "nan", "inf", "-inf", "-1", "1e", "1,5", "true", "[1]", "1" * 400]
    if field.high < 10**12:
        texts.append(str(int(field.high) + 1))
    if field.positive:
        texts.append("0")
    if field.kind is int:
        texts += ["1.5", "1e3", "0x10"]
    return texts if field.optional else [*texts, "", "None"]


@given(st.data())
def test_valid_values_are_accepted(data):
    """Oracle: the schema; a value in range never fails alone."""
    key = data.draw(st.sampled_from(sorted(SCHEMA)))
    text = good_text(key, SCHEMA[key], data.draw)
    config = apply_overrides(default_config(), {key: text})
    flat = configuration.flatten(config)
    assert checked_value(key, flat[key]) == flat[key]


@pytest.mark.parametrize(
    ("key", "text"), [(k, t) for k, field in SCHEMA.items() for t in bad_texts(field)]
)
def test_invalid_values_are_refused_in_one_line(key, text):
    """Oracle: the schema; out of range, of another type, not a choice."""
    with pytest.raises(ConfigError) as refusal:
        resolved(**{key: text})
    message = str(refusal.value)
    assert key in message
    assert "must be" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("betta", "did you mean config.beta?"),
        ("stepss", "did you mean config.steps?"),
        ("sub_batch", "did you mean config.jacobian.sub_batch?"),
        ("jacobian", "it is a group"),
        ("optimizer.learning_rat", "did you mean config.optimizer.learning_rate?"),
        ("zzzzzz", "--help"),
        ("", "--help"),
    ],
)
def test_unknown_keys_get_a_hint(key, hint):
    with pytest.raises(ConfigError, match="unknown field") as refusal:
        resolved(**{key: "1"})
    assert hint in str(refusal.value)


@pytest.mark.parametrize(
    "overrides",
    [
        {"method": "softmax_ce"},
        {"network": "resnet20", "dropout_rate": "0.5"},
        {"network": "resnet20", "batch_norm": "false"},
        {"batch_norm": "false", "batch_norm_start": "uniform"},
        {"jacobian.sub_batch": "65"},
        {"jacobian.batch_stats": "paper", "jacobian.chunk_size": "4"},
        {"jacobian.batch_stats": "paper", "jacobian.mode": "forward"},
        {
            "beta": "0",
            "jacobian.always_split": "true",
            "jacobian.batch_stats": "paper",
            "jacobian.estimator": "few",
        },
        {"optimizer.decay_epochs": "(5, 5)"},
        {"data.ood": "svhn_cropped"},
        {"network": "own"},
        {"network_digest": "0123456789ab"},
        {"network": "own", "network_digest": "0123456789ab", "dropout_rate": "0.5"},
    ],
)
def test_contradictions_are_refused(overrides):
    with pytest.raises(ConfigError):
        resolved(**overrides)


def test_a_config_file_with_a_wrong_type_is_refused():
    config = default_config()
    with config.unlocked(), config.ignore_type():
        config.steps = "many"
    with pytest.raises(ConfigError, match=r"config\.steps='many': must be a whole number"):
        resolve(config)


def test_missing_and_extra_fields_are_refused():
    config = default_config()
    with config.unlocked():
        del config.beta
    with pytest.raises(ConfigError, match=r"config\.beta is missing"):
        resolve(config)
    extra = default_config()
    with extra.unlocked():
        extra.betta = 1.0
    with pytest.raises(ConfigError, match=r"did you mean config\.beta"):
        resolve(extra)


def test_hash_and_differences():
    """Oracle: the definition; what changes the result changes the identity, nothing else does."""
    plain = resolved()
    assert configuration.config_hash(plain) == configuration.config_hash(resolved(log_every="7"))
    assert configuration.config_hash(plain) != configuration.config_hash(resolved(beta="0.5"))
    # As read back from config.json, where tuples are lists.
    saved = json.loads(json.dumps(plain.to_dict()))
    assert configuration.differences(saved, resolved(log_every="7", steps="9999").to_dict()) == []
    assert configuration.differences(saved, resolved(beta="0.5").to_dict()) == [
        "config.beta: 0.001 -> 0.5"
    ]
    assert configuration.differences(saved, resolved(steps="1").to_dict())


def test_command_line_parsing():
    options, overrides = parse(
        ["--mode=evaluate", "--config.beta=1e-3", "--config.data.dir", "/x", "--config=f.py"]
    )
    assert (options.mode, options.config) == ("evaluate", "f.py")
    assert overrides == {"beta": "1e-3", "data.dir": "/x"}
    with pytest.raises(ConfigError, match="needs a value"):
        parse(["--config.beta"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
        ("def get_config(): return 3", "must return"),
        ("x = 1", "AttributeError"),
        ("def (", "SyntaxError"),
    ],
)
def test_broken_config_files_are_one_line(tmp_path, content, message):
    path = tmp_path / "broken.py"
    path.write_text(content)
    with pytest.raises(ConfigError) as refusal:
        load_config(str(path))
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_absent_and_odd_config_files(tmp_path):
    with pytest.raises(ConfigError, match=r"mass_resnet20, "):
        load_config(str(tmp_path / "absent.py"))
    odd = Path(tmp_path / "config.txt")
    odd.write_text("")
    with pytest.raises(ConfigError, match="not a Python file"):
        load_config(str(odd))


@pytest.mark.parametrize("path", CONFIG_FILES, ids=lambda path: path.stem)
def test_the_command_of_a_run_gives_the_same_run(path):
    """Oracle: parsing it again."""
    config = resolve(load_config(str(path)))
    options, overrides = parse(configuration.as_command(config).split()[3:])
    again = resolve(apply_overrides(load_config(options.config), overrides))
    assert configuration.config_hash(again) == configuration.config_hash(config)


def test_help_names_every_field():
    text = configuration.help_text()
    assert all(f"--config.{key}=" in text for key in SCHEMA)
