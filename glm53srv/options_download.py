"""The options of fetching a model: a part of the table in options.py."""

from __future__ import annotations

from glm53srv.option import Option

DOWNLOAD_OPTIONS: tuple[Option, ...] = (
    Option(
        "model_repo",
        ("--model-repo",),
        "GLM53_MODEL_REPO",
        "str",
        None,
        "repository that serve fetches when the model directory has no config.json (default: none, and "
        "nothing is fetched; `glm53srv download` takes turboderp/GLM-5.3-Flash-exl3)",
        "model",
    ),
    Option(
        "model_revision",
        ("--model-revision",),
        "GLM53_MODEL_REVISION",
        "str",
        None,
        "commit, branch or tag of that repository (default: the pinned commit of 3.05 bits per weight for "
        "turboderp/GLM-5.3-Flash-exl3, main for any other)",
        "model",
    ),
    Option(
        "model_download",
        ("--model-download",),
        "GLM53_MODEL_DOWNLOAD",
        "choice",
        "1",
        "0: serve never fetches a model, and says what is missing",
        "model",
        choices=("1", "0"),
    ),
)
