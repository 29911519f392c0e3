"""The variables and flags of 0xSero/glm53-flash-offload, and what they do here.

All of its documented names are accepted, so that a start command moves over as it is. Names of what this
server does not have are either without effect, which the log says at the start, or refused where ignoring
them would serve something else than was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OriginalName:
    """One name. option: the option of this server that it sets, "" if it is for the start scripts only."""

    name: str
    option: str
    effect: str


ORIGINAL_NAMES = (
    OriginalName("GLM53_MODE", "mode", "`fast`, `exact`; `nvme` modes are refused: all experts lie in RAM"),
    OriginalName("GLM53_CPU_TIER", "mode", "`0` is `exact`, `1` is `fast`; goes before GLM53_MODE"),
    OriginalName("GLM53_MODEL_DIR", "model", "the same"),
    OriginalName("GLM53_MODEL_REPO", "model_repo", "the same; nothing is fetched unless it is set"),
    OriginalName("GLM53_MODEL_REVISION", "model_revision", "the same"),
    OriginalName("GLM53_MODEL_DOWNLOAD", "model_download", "the same"),
    OriginalName("GLM53_CT_CPUS", "ct_cpus", "the same"),
    OriginalName("GLM53_CT_THREADS", "ct_threads", "the same; `0` is one per CPU"),
    OriginalName("GLM53_CT_A", "ct_a", "the same, but measured where it is not set"),
    OriginalName("GLM53_CT_B", "ct_b", "the same, but measured where it is not set"),
    OriginalName("GLM53_CT_TZC", "ct_tzc", "the same, but measured where it is not set"),
    OriginalName("GLM53_CT_SWZ", "ct_swz", "without effect: there is one copy of the experts in one layout"),
    OriginalName("GLM53_EC_RESERVE_GB", "ec_reserve_gb", "the same"),
    OriginalName("GLM53_EC_STAGE_GB", "ec_stage_gb", "the same"),
    OriginalName("GLM53_EC_ELASTIC_GB", "ec_elastic_gb", "the same"),
    OriginalName("GLM53_EC_MAX_SLOTS", "ec_max_slots", "the same"),
    OriginalName("PORT", "port", "the same"),
    OriginalName("SERVED_NAME", "served_name", "the same"),
    OriginalName("GLM53_ARGS", "", "the same, in docker/entrypoint.sh"),
    OriginalName("GLM53_ROOT", "", "the same, in docker/entrypoint.sh and scripts/install.sh"),
    OriginalName("-m", "model", "the same"),
    OriginalName("-cs", "cache_tokens", "the same"),
    OriginalName("-chunk_size", "chunk_tokens", "the same"),
    OriginalName("--max-batch-size", "max_streams", "streams that decode together; one setting with `-ambs`"),
    OriginalName("-ambs", "max_streams", "a stream owns a recurrent state, so it is the same number"),
    OriginalName("--host", "host", "the same"),
    OriginalName("--port", "port", "the same"),
    OriginalName("--served-name", "served_name", "the same"),
)

WITHOUT_EFFECT = {
    "GLM53_K_HCFUSE": "there is no such switch",
    "GLM53_K_FTSPLIT": "there is no such switch",
    "GLM53_K_OVL": "there is no such switch",
    "GLM53_TRITON_PIN": "that file belongs to the other server",
    "GLM53_EC": "the expert cache cannot be switched off",
    "GLM53_EC_WARM": "that file belongs to the other server",
    "GLM53_EC_STAGE_MIN": "there is no such switch",
    "GLM53_ZC_VRAM": "there is one home for all experts",
    "GLM53_ZC_STATS": "that file belongs to the other server",
    "GLM53_MAX_RQ_TOKENS": "pages are given as a sequence grows",
    "GLM53_DISCONNECT_CHECK_S": "a closed connection is noticed at once",
    "GLM53_LA": "there is no such switch",
    "GLM53_LA_BTTRIM": "there is no such switch",
    "GLM53_MAIN_CPUS": "the engine's thread is not pinned",
    "-rcs": "there is no such cache",
}
"""Accepted, with the reason why they change nothing. The flags among them take a value."""

REFUSED_PREFIXES = {
    "GLM53_NV": "there is no NVMe mode: all experts lie in RAM",
    "GLM53_B70": "there is no tier on another card",
}
"""What these ask for would be a different server."""

CPU_TIER_ENV = "GLM53_CPU_TIER"
CPU_TIER_MODES = {"0": "exact", "1": "fast"}
