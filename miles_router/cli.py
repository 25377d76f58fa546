"""The command `miles-router`: start the router, show its configuration, or inspect recorded state."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from miles_router.errors import ConfigError
from miles_router.settings.config import FIELDS, GROUPS, PATHS, Loaded, RouterConfig, load, nearest, shown, type_name
from miles_router.settings.values import show
from miles_router.version import __version__

if TYPE_CHECKING:
    from miles_router.state.blobs import Blobs

DESCRIPTION = (
    "Route RL rollouts to SGLang workers: least in-flight, byte for byte, with middlewares around every request."
)
COMMANDS = """\
commands:
  miles-router [options]              start the router
  miles-router config [options]       print every setting, its value and where it came from
  miles-router middlewares [options]  list the middleware stack with every option
  miles-router state DIR [OWNER]      list the contents of a state directory, or write an owner's as lines of JSON
  miles-router check PKG.MOD.CLASS    run the middleware contract suite on a class
  miles-router view FILE              write a page that shows a file of samples token by token (view --help)
  miles-router reach URL              check from outside what an agent in a remote sandbox needs (reach --help)
  miles-router ray --nodes N [options]  start one router on N machines of a Ray cluster (docs/scale.md)
  miles-router audit --router URL     compare recorded logprobs with those of the engines (audit --help)

Every setting is also a YAML key (--config) and an environment variable (MILES_ROUTER_PORT=31000).
Precedence: defaults < --config < environment < flags < --set.
"""
#: Flags that are valid only with `--leader` or `--join`.
OF_PARTS = ("shards", "shard", "url", "secret_file", "shared_state")
#: Functions of tools that ship with the middlewares: the commands `audit` and `view`.
AUDIT, VIEW = "middleware_hub.auditing.tool.command.run", "middleware_hub.view.command.view"
#: For each kind of owner in a state directory, the function that yields its lines of JSON.
WRITERS = {
    "session": "middleware_hub.openai_session.export.held.lines_of",
    "family": "middleware_hub.radix_tree.archive.lines.lines_of",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line. On an invalid setting, print one line to standard error and exit with status 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments and arguments[0] in (*ACTIONS, *APART) else "run"
    try:
        if command in APART:
            status = APART[command](arguments)
            sys.stdout.flush()
            if status:
                sys.exit(status)
            return
        options = parser().parse_args(arguments)
        if options.names and command not in ("check", "state"):
            parser().error(f"unrecognized arguments: {' '.join(options.names)}")
        sys.path.insert(0, os.getcwd())  # middlewares in the current directory can be imported, as with python -m
        ACTIONS[command](options)
        sys.stdout.flush()
    except ConfigError as error:
        print(f"miles-router: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader has gone (`| head`); Python's flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line, like every other invalid setting."""

    def error(self, message: str) -> NoReturn:
        flag = next((word for word in message.split() if word.startswith("--")), "")
        known = [option for action in self._actions for option in action.option_strings]
        near = nearest(flag.partition("=")[0], known) if message.startswith("unrecognized") else ""
        self.exit(2, f"miles-router: {message}{near}\n")


def parser() -> argparse.ArgumentParser:
    """Return a parser with one flag per setting. Values stay text; `load` converts them like values from other
    sources."""
    made = _Parser(
        prog="miles-router",
        usage="miles-router [command] [options]",
        description=DESCRIPTION,
        epilog=COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("names", nargs="*", help=argparse.SUPPRESS)
    made.add_argument("--config", metavar="FILE", help="YAML file of settings")
    group: argparse._ActionsContainer = made
    for name, spec in FIELDS.items():
        if name in GROUPS:
            group = made.add_argument_group(GROUPS[name])
        if name == "middlewares":
            _add_flag(group, PATHS, "dotted paths of middleware classes, first listed = outermost")
        else:
            _add_flag(group, name, spec.metadata["help"])
    made.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting, or a middleware's option: --set radix_tree_middleware.limit=4 (repeatable)",
    )
    machines = made.add_argument_group("several machines (docs/scale.md)")
    machines.add_argument(
        "--leader", action="store_true", help="run as the leader; shards connect to it at --host and --port"
    )
    machines.add_argument("--join", metavar="HOST:PORT", help="run as a shard; the leader's address")
    machines.add_argument("--shards", metavar="N", type=int, help="how many shards the router has")
    machines.add_argument("--shard", metavar="K", type=int, help="the number of this shard, from 0")
    machines.add_argument("--url", help="this shard's URL for the other shards [default: http://HOSTNAME:PORT]")
    machines.add_argument("--secret-file", metavar="FILE", help="file with the secret that leader and shards share")
    machines.add_argument("--shared-state", action="store_true", help="leader and shards use the same --state-dir")
    made.add_argument("--version", action="version", version=f"miles-router {__version__}")
    return made


def view_parser() -> argparse.ArgumentParser:
    """Return the parser of `miles-router view`, which takes no settings."""
    made = _Parser(
        prog="miles-router view",
        description="Write one self-contained page that shows a file of samples token by token.",
        allow_abbrev=False,
    )
    made.add_argument(
        "file", metavar="FILE", help="samples as the router returns them, in any of its JSON or safetensors forms"
    )
    made.add_argument("--output", metavar="PAGE", help="the page to write; default: FILE with the ending .html")
    text = "directory or hub name with the model's tokenizer; without it the page shows ids alone"
    made.add_argument("--hf-checkpoint", metavar="DIR", help=text)
    return made


def ray_parser() -> argparse.ArgumentParser:
    """Return the parser of `miles-router ray`, which takes all settings."""
    made = parser()
    made.prog = "miles-router ray"
    made.usage = "miles-router ray --nodes N [options]"
    made.description = "One router on several machines of a Ray cluster, until SIGTERM."
    made.add_argument("--address", metavar="ADDRESS", default="auto", help="the cluster's head node [default: auto]")
    made.add_argument("--nodes", metavar="N", type=int, required=True, help="number of machines")
    return made


class _Switch(argparse.Action):
    """A flag for a boolean setting: `--otel`, `--no-otel`, `--otel true` or `--otel false`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        off = option_string is not None and option_string.startswith("--no-")
        if off and values is not None:
            parser.error(f"{option_string} takes no value, got {show(values)}")
        setattr(namespace, self.dest, "false" if off else "true" if values is None else values)


def _add_flag(group: argparse._ActionsContainer, name: str, text: str) -> None:
    spelled = name.replace("_", "-")
    flags = [f"--{spelled}"]
    more: dict[str, Any] = {"metavar": "PATH", "nargs": "+", "action": "extend"}
    if name in FIELDS:
        default = FIELDS[name].default
        text += f" [default: {shown(RouterConfig(), name)}]"
        if isinstance(default, tuple):
            more["metavar"] = "TEXT"
        elif isinstance(default, bool):
            flags, more = [*flags, f"--no-{spelled}"], {"metavar": "true|false", "nargs": "?", "action": _Switch}
        else:
            more = {"metavar": _placeholder(name)}
    group.add_argument(*flags, dest=name, default=None, help=text.replace("%", "%%"), **more)


def _placeholder(name: str) -> str:
    """Return the placeholder for a setting's value in `--help`."""
    choices = type_name(name).split(" | ")
    return {"str": "TEXT", "int": "N", "float": "NUMBER"}.get(choices[0]) or "|".join(choices)


def _load(options: argparse.Namespace) -> Loaded:
    flags = {name: getattr(options, name) for name in (*FIELDS, PATHS) if getattr(options, name, None) is not None}
    return load(flags, os.environ, options.set, options.config)


def _run(options: argparse.Namespace) -> None:
    loaded = _load(options)
    if options.leader or options.join:
        from miles_router.serving.machines import serve_part

        serve_part(loaded.config, options)
        return
    given = [name for name in OF_PARTS if getattr(options, name) not in (None, False)]
    if given:  # without --leader or --join, a shard would start as a router of its own
        raise ConfigError(f"{given[0].replace('_', '-')}: only with --leader or --join")
    from miles_router.compat import run

    run(loaded.config)


def _show_config(options: argparse.Namespace) -> None:
    loaded = _load(options)
    rows = [(name, shown(loaded.config, name), loaded.origins[name]) for name in FIELDS]
    print_table(("setting", "value", "from"), rows)


def _show_middlewares(options: argparse.Namespace) -> None:
    loaded = _load(options)
    from miles_router.middlewares.loading import REQUIRED, load_middlewares

    rows = []
    for position, each in enumerate(load_middlewares(loaded.config.chain), 1):
        rows.append((f"{position}. {each.name}", each.path, "", "", ""))
        for option in each.table:
            default = "(required)" if option.default is REQUIRED else repr(option.default)
            rows.append(("", f"{each.name}.{option.name}", option.type, default, repr(option.value)))
    if not rows:
        print("no middlewares: requests go straight to the workers")
        return
    print_table(("stack (first = outermost)", "class / option", "type", "default", "value"), rows)


def _check(options: argparse.Namespace) -> None:
    if not options.names:
        raise ConfigError("check: name the classes to check, as pkg.module.Class")
    from miles_router.check import check_path

    loaded = _load(options)
    failed = False
    for path in options.names:
        for clause, problem in check_path(path, loaded.config):
            failed = failed or problem is not None
            print(f"{'FAIL' if problem else 'ok':<5} {path}: {clause}" + (f": {problem}" if problem else ""))
    if failed:
        sys.exit(1)


def _view(arguments: Sequence[str]) -> int:
    from miles_router.middlewares.checkpoint import load_tokenizer

    options = view_parser().parse_args(arguments)
    view = _found("view", VIEW)
    wanted = options.hf_checkpoint is not None
    tokenizer = load_tokenizer(RouterConfig(hf_checkpoint=options.hf_checkpoint)) if wanted else None
    print(view(Path(options.file), Path(options.output) if options.output else None, tokenizer))
    return 0


def _show_state(options: argparse.Namespace) -> None:
    if not 1 <= len(options.names) <= 2:
        raise ConfigError("state: expected DIRECTORY, or DIRECTORY OWNER to print one owner as lines of JSON")
    from miles_router.state.inspection import blobs_of, holdings

    directory, owners = Path(options.names[0]), options.names[1:]
    for owner in owners:
        for blobs in blobs_of(directory, owner):
            _write_owner(owner, blobs)
    if owners:
        return
    rows = [[each if each.isprintable() else repr(each) for each in map(str, row)] for row in holdings(directory)]
    print_table(("file", "owner", "kind", "blobs", "bytes", "large"), rows)


def _write_owner(owner: str, blobs: Blobs) -> None:
    from miles_router.state.inspection import kind_of

    kind = kind_of(owner, blobs[0]) if 0 in blobs else None
    if kind not in WRITERS:
        raise ConfigError(f"state: {owner!r} cannot be printed as lines of JSON: it is not a {' or '.join(WRITERS)}")
    lines = _found("state", WRITERS[kind])

    async def write() -> None:
        for line in lines(owner, blobs):
            sys.stdout.buffer.write(line + b"\n")

    try:
        asyncio.run(write())
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"state: {owner!r} cannot be read: {error!r}") from None


def print_table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows below a heading, with each column as wide as its longest cell."""
    widths = [max(len(row[i]) for row in (heading, *rows)) for i in range(len(heading))]
    for row in (heading, tuple("-" * width for width in widths), *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _ray(arguments: Sequence[str]) -> int:
    options = ray_parser().parse_args(arguments)
    if options.names:
        ray_parser().error(f"unrecognized arguments: {' '.join(options.names)}")
    loaded = _load(options)
    try:
        from miles_router.ray.router import run
    except ImportError as error:  # an extra is not installed; the message names it
        raise ConfigError(f"ray: {error}") from None
    run(loaded.config, options.address, options.nodes)
    return 0


def _audit(arguments: Sequence[str]) -> int:
    status: int = _found("audit", AUDIT)(arguments)
    return status


def _reach(arguments: Sequence[str]) -> int:
    from miles_router.reach.command import run

    return run(arguments)


def _found(command: str, path: str) -> Callable[..., Any]:
    """Import the function at a dotted path.

    Raises:
        ConfigError: a module that the command needs is not installed; the message names it.
    """
    module, _, name = path.rpartition(".")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(f"{command}: {error}") from None
    return function


#: Commands that take the flags of all settings.
ACTIONS = {"run": _run, "config": _show_config, "middlewares": _show_middlewares, "check": _check, "state": _show_state}
#: Commands that parse their own arguments; each returns its exit status.
APART = {"audit": _audit, "ray": _ray, "reach": _reach, "view": _view}
