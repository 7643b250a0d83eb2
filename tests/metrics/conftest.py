"""SGLang imported once, forks of it, no option of the plugin set."""

from ..processes import clean_environment, forked, sglang  # noqa: F401
