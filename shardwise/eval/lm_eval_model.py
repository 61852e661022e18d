"""Our models in lm-eval (EleutherAI's evaluation harness): its command, and its functions.

    python -m shardwise.eval.lm_eval_model --model shardwise --model_args path=runs/first --tasks tasks.yaml

takes all options of `lm_eval`. From Python: `lm_eval.simple_evaluate(model=lm_eval_model("runs/first"), tasks=[...])`.
"""

from functools import lru_cache
from typing import Any

from shardwise.errors import JobError
from shardwise.eval.language_model import LanguageModel


@lru_cache(maxsize=1)
def lm_eval_class() -> Any:
    """Returns `LanguageModel` as a subclass of lm-eval's LM."""
    try:
        from lm_eval.api.model import LM
    except ImportError:
        raise JobError("lm-eval is not installed; run `pip install lm_eval`, or use `shardwise eval`.") from None
    return type("ShardwiseLM", (LanguageModel, LM), {"tokenizer_name": "", "__doc__": LanguageModel.__doc__})


def lm_eval_model(path: str, **options: Any) -> Any:
    """Returns a run or folder as a model for lm-eval."""
    return lm_eval_class()(path, **options)


def main() -> None:
    """Runs lm-eval's own command with the model `shardwise`."""
    model_class = lm_eval_class()
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model

    register_model("shardwise")(model_class)
    cli_evaluate()


if __name__ == "__main__":
    main()
