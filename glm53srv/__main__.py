"""The `glm53srv` command.

    glm53srv serve     [options]              serve the model over HTTP
    glm53srv generate  PROMPT [options]       answer one prompt in the terminal
    glm53srv doctor    [--json] [options]     say what this machine can run, and why
    glm53srv doctor    --plan [--json] [--vram GIB] [--ram GIB] [options]
                                              say what VRAM and RAM are for, and whether they suffice
    glm53srv config    [--json] [options]     say which values are in force, and where they come from
    glm53srv download  [--verify] [options]   fetch the model, or complete it; --verify hashes all of it
    glm53srv pack random --out DIR [--seed N] write a small random model, to start without a download
    glm53srv panel make --out FILE [options]  write a reference panel of a model, to score servers against
    glm53srv bench-model [--layers N] [--help] measure a GPU on random weights of the published model's size
    glm53srv pin-triton [--out FILE] [--layers N] [options]
                                              choose the GPU's Triton kernels by timing, once, for all starts

serve, generate, doctor and config take the small demo model that comes with the package when no model is
named; doctor --plan takes the published one.

Exit codes: 0 done; 2 wrong flag, variable or file entry; 3 the checkpoint; 4 this machine; 5 the engine
failed; 6 the download; 1 anything else; 128 + n ended by signal n, before the port was open or a second time.
doctor ends with the code that serve would end with.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from glm53srv import __version__
from glm53srv.errors import CheckpointError, ConfigError, Glm53Error
from glm53srv.options import closest_hint
from glm53srv.probe import LocalProbe, Probe

Command = Callable[[Sequence[str]], int]

HAVE_OWN_HELP = ("bench-model",)
"""Commands that take none of the server's options."""


def main(argv: Sequence[str], probe: Probe | None = None) -> int:
    """Run one command and return its exit code.

    argv: without the program's name. probe: the machine that serve, doctor and config see, None for this one.
    """
    machine = probe or LocalProbe()
    commands: Mapping[str, Command] = {
        "serve": partial(_serve, machine),
        "generate": _generate,
        "doctor": partial(_doctor, machine),
        "config": partial(_config, machine),
        "download": _download,
        "pack": _pack,
        "panel": _panel,
        "bench-model": partial(_bench_model, machine),
        "pin-triton": partial(_pin_triton, machine),
    }
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if argv else ConfigError.exit_code
    if argv[0] in ("-V", "--version", "version"):
        print(f"glm53srv {__version__}")
        return 0
    command = commands.get(argv[0])
    try:
        if command is None:
            hint = closest_hint(argv[0], commands)
            raise ConfigError(f"unknown command {argv[0]!r}{hint}; the commands are {', '.join(commands)}")
        if any(word in ("-h", "--help") for word in argv[1:]) and argv[0] not in HAVE_OWN_HELP:
            print(_help())
            return 0
        return command(argv[1:])
    except Glm53Error as error:
        print(f"glm53srv: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def run() -> None:
    """Entry point of the console script, and the only place that changes what signals do to the process."""
    argv = sys.argv[1:]
    if argv[:1] in (["serve"], ["download"]):
        from glm53srv.download_command import end_at_signals

        end_at_signals()
    raise SystemExit(main(argv))


def _serve(probe: Probe, argv: Sequence[str]) -> int:
    from glm53srv.config import load_config
    from glm53srv.demo_model import find_demo_model
    from glm53srv.doctor.examine import require_machine, require_servable
    from glm53srv.download_command import fetch_if_missing
    from glm53srv.server import serve

    config = load_config(argv, num_cores=probe.facts().num_physical_cores, default_model=find_demo_model())
    set_up_logging(config.server.log_level)
    require_machine(config, probe)  # before 125 GB are fetched for nothing
    if fetched := fetch_if_missing(config, sys.stderr):
        logging.getLogger(__name__).info("fetched %s", fetched)
    require_servable(config, probe)
    return _run_loop(serve(config, sys.stderr))


def _generate(argv: Sequence[str]) -> int:
    from glm53srv.config import load_config
    from glm53srv.demo_model import find_demo_model
    from glm53srv.generate import GenerateOptions, generate

    options, rest = GenerateOptions.parse(argv)
    config = load_config(rest, default_model=find_demo_model())
    set_up_logging("warning")
    return _run_loop(generate(config, options, sys.stdout, sys.stderr))


def _doctor(probe: Probe, argv: Sequence[str]) -> int:
    from glm53srv.config import load_config
    from glm53srv.demo_model import find_demo_model
    from glm53srv.doctor.examine import examine
    from glm53srv.doctor.findings import as_json, exit_code, report
    from glm53srv.doctor.plan import PlanFlags, make_plan
    from glm53srv.flags import take_flags

    words, switches = take_flags(argv, {}, ("--json", "--plan"))
    flags, rest = PlanFlags.take(words)
    is_plan, is_json = "--plan" in switches, "--json" in switches
    config = load_config(
        rest,
        num_cores=probe.facts().num_physical_cores,
        needs_model=False,
        default_model=None if is_plan else find_demo_model(),  # as serve; a plan is for the full model
    )
    if is_plan:
        plan = make_plan(config, probe, flags)
        print(json.dumps(plan.as_json(), indent=2) if is_json else plan.text())
        return plan.exit_code
    if flags.is_given:
        raise ConfigError("--vram and --ram pretend a machine for a plan; add --plan")
    findings = examine(config, probe)
    print(json.dumps(as_json(findings), indent=2) if is_json else report(findings))
    return exit_code(findings)


def _config(probe: Probe, argv: Sequence[str]) -> int:
    from glm53srv.config import process_environment
    from glm53srv.config_command import show_config
    from glm53srv.demo_model import find_demo_model
    from glm53srv.flags import take_flags

    rest, switches = take_flags(argv, {}, ("--json",))
    num_cores = probe.facts().num_physical_cores
    shown = show_config(
        rest,
        process_environment(),
        num_cores,
        is_json="--json" in switches,
        default_model=find_demo_model(),
    )
    print(shown)
    return 0


def _download(argv: Sequence[str]) -> int:
    from glm53srv.download_command import download_command

    set_up_logging("warning")
    print(download_command(argv, sys.stderr))
    return 0


def _pack(argv: Sequence[str]) -> int:
    from glm53srv.flags import take_flags
    from glm53srv.model.pack import pack_random_model
    from glm53srv.progress import ProgressLine

    words, flags = take_flags(argv, {"--out": "a directory", "--seed": "a whole number"})
    if words != ["random"]:
        raise ConfigError("pack what? `glm53srv pack random --out DIR` is the one kind there is")
    if "--out" not in flags:
        raise ConfigError("pack random needs --out DIR")
    seed = flags.get("--seed", "0")
    if not seed.isdigit():
        raise ConfigError(f"--seed is {seed!r}, must be a whole number from 0")
    out_dir = Path(flags["--out"]).expanduser()
    try:
        pack_random_model(out_dir, int(seed), ProgressLine(sys.stderr, label="packing"))
    except OSError as error:
        raise CheckpointError(
            f"{out_dir} cannot be written: {error.strerror or error}; name another directory with --out"
        ) from error
    print(f"{out_dir}: a small random model; it speaks nonsense, and is for trying the server only")
    return 0


def _panel(argv: Sequence[str]) -> int:
    from glm53srv.config import load_config
    from glm53srv.engine.factory import load_engine
    from glm53srv.machine import read_machine
    from glm53srv.panel import PanelOptions, make_panel
    from glm53srv.progress import ProgressLine

    options, rest = PanelOptions.parse(argv)
    config = load_config(rest).engine
    progress = ProgressLine(sys.stderr, label="judging")
    load = ProgressLine(sys.stderr)
    print(make_panel(options, config.model_dir, lambda: load_engine(config, read_machine(), load), progress))
    return 0


def _bench_model(probe: Probe, argv: Sequence[str]) -> int:
    from glm53srv.bench_model.options import make_parser, parse_options

    if any(word in ("-h", "--help") for word in argv):
        print(make_parser().format_help())
        return 0
    options = parse_options(argv)
    from glm53srv.engine.cuda.synthetic_plan import require_host_memory
    from glm53srv.engine.factory import require_cuda
    from glm53srv.model.published_files import published_model

    model = published_model(options.layers)
    machine = probe.facts()
    require_cuda(machine, "bench-model", probe.version)
    require_host_memory(model, machine)
    from glm53srv.bench_model.command import run_bench

    set_up_logging("info")
    run_bench(options, machine, lambda line: print(line, flush=True))
    return 0


def _pin_triton(probe: Probe, argv: Sequence[str]) -> int:
    from glm53srv.config import NO_MODEL, load_config
    from glm53srv.engine.cuda.synthetic_plan import require_host_memory
    from glm53srv.engine.factory import require_cuda
    from glm53srv.flags import take_flags
    from glm53srv.model.published_files import FEWEST_LAYERS, published_model

    words, flags = take_flags(argv, {"--out": "a file", "--layers": "a whole number"})
    machine = probe.facts()
    config = load_config(words, num_cores=machine.num_physical_cores, needs_model=False).engine
    model_dir = None if config.model_dir == NO_MODEL else config.model_dir
    layers = flags.get("--layers", str(FEWEST_LAYERS))
    if not layers.isdecimal():
        raise ConfigError(f"--layers is {layers!r}, must be a whole number")
    if model_dir is not None and "--layers" in flags:
        raise ConfigError("--layers is for random weights; leave it or the model away")
    out = Path(flags["--out"]).expanduser() if "--out" in flags else None
    if out is None and config.tuning_dir is None:
        raise ConfigError("there is no home folder to keep the file in; give --out FILE or --tuning-dir")
    drawn = published_model(int(layers))
    require_cuda(machine, "pin-triton", probe.version)
    if model_dir is None:
        require_host_memory(drawn, machine)
    from glm53srv.engine.cuda.pin_command import PinOptions, make_pins

    set_up_logging("info")
    options = PinOptions(model_dir, int(layers), out, config.tuning_dir)
    path = make_pins(options, machine, lambda line: print(line, flush=True))
    print(f"{path}: written; serve takes it from the folder that --tuning-dir names")
    return 0


def set_up_logging(level: str) -> None:
    """Write log lines to standard error: time, level, module, text."""
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
        force=True,
    )
    for noisy in ("hypercorn.error", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _run_loop(main_task: Coroutine[Any, Any, int]) -> int:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main_task)


def _help() -> str:
    from glm53srv.options import usage

    assert __doc__ is not None
    takers = "serve, generate, doctor, config, download, panel and pin-triton"
    return f"{__doc__.strip()}\n\nOptions of {takers}:\n{usage()}"


if __name__ == "__main__":
    run()
