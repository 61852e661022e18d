"""Our models in lm-eval (EleutherAI's harness): `simple_evaluate(model=lm_eval_model("runs/first"), ...)`, and
its own command with all of its options:

    python -m shardwise.eval.lm_eval_model --model shardwise --model_args path=runs/first --tasks tasks.yaml"""

from typing import Any

from shardwise.errors import JobError
from shardwise.eval.language_model import LanguageModel


def lm_eval_class() -> Any:
    """Returns `LanguageModel` as a subclass of lm-eval's LM."""
    try:
        from lm_eval.api.model import LM
    except ImportError:
        raise JobError("lm-eval is not installed; run `pip install lm_eval`, or use `shardwise eval`.") from None
    return type("ShardwiseLM", (LanguageModel, LM), {"tokenizer_name": ""})


def lm_eval_model(path: str, **options: Any) -> Any:
    """Returns a run or folder as a model for lm-eval."""
    return lm_eval_class()(path, **options)


if __name__ == "__main__":
    model_class = lm_eval_class()
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model

    register_model("shardwise")(model_class)
    cli_evaluate()
