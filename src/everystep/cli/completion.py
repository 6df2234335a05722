"""`everystep completion SHELL`: what a shell needs to complete command lines.

The script for a shell asks `everystep completion words` at every press of the key, with the words
that were typed, and gets a candidate per line. Nothing is written to a file of the user's, nothing
that a candidate says is run by the shell, and torch is not imported. Where there is no candidate,
the shell completes names of files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer

from everystep.cli.command_options import CacheDtype, Dtype, Rounding
from everystep.cli.models import WrittenFormat
from everystep.cli.terminal import write_line
from everystep.config.installed import HOOKS, PROCESSORS
from everystep.config.named_strategies import NAMED
from everystep.files.hub import cached_repositories
from everystep.files.sources import KNOWN_MODELS, cached_models

completion = typer.Typer(
    help="Print a script that completes command lines of everystep in a shell."
)

_BASH = r"""# In ~/.bashrc: eval "$(everystep completion bash)"
_everystep() {
    local line
    COMPREPLY=()
    while IFS= read -r line; do
        COMPREPLY+=("$line")
    done < <(everystep completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -o bashdefault -o default -F _everystep everystep
"""
_ZSH = r"""#compdef everystep
# In ~/.zshrc, after compinit: eval "$(everystep completion zsh)"
_everystep() {
    local -a found
    found=("${(@f)$(everystep completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    found=("${(@)found:#}")
    if (( ${#found} )); then
        compadd -a found
    else
        _files
    fi
}
compdef _everystep everystep
"""
_FISH = r"""# In ~/.config/fish/config.fish: everystep completion fish | source
function __everystep
    set -l typed (commandline -opc) (commandline -ct)
    set -l found (everystep completion words -- $typed[2..-1] 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c everystep -f -a '(__everystep)'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


@completion.callback(invoke_without_command=True)
def require_shell(context: typer.Context) -> None:
    """Print a script that completes command lines of everystep in a shell."""
    if context.invoked_subcommand is None:
        raise typer.BadParameter(f"which shell is it? There are {', '.join(SCRIPTS)}")


def _print(shell: str) -> Callable[[], None]:
    def command() -> None:
        write_line(SCRIPTS[shell].rstrip("\n"))

    command.__doc__ = f"Print the script for {shell}; its first lines say where it goes."
    return command


for _shell in SCRIPTS:
    completion.command(_shell)(_print(_shell))


@completion.command("words", hidden=True, context_settings={"ignore_unknown_options": True})
def print_candidates(
    context: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(help="The words after `everystep`.")] = None,
) -> None:
    """Print what the last of the words may become, one candidate per line."""
    root = context.find_root().command
    for candidate in candidates(root, words or [""]):
        write_line(candidate)


def _models() -> Iterable[str]:
    return [*KNOWN_MODELS, *(one.name for one in cached_models()), *cached_repositories()]


VALUES: Mapping[str, Callable[[], Iterable[str]]] = {
    "dtype": lambda: Dtype,
    "quantize": lambda: Rounding,
    "cache_dtype": lambda: CacheDtype,
    "format": lambda: WrittenFormat,
    "device": lambda: ("cpu", "cuda"),
    "strategy": lambda: NAMED,
    "processor": PROCESSORS.names,
    "hook": HOOKS.names,
    "model": _models,
    "assistant": _models,
    "source": _models,
    "name": lambda: (one.name for one in cached_models()),
}
"""The possible values of parameters with these names."""


def candidates(root: Any, words: Sequence[str]) -> list[str]:
    """Return what the last word may become, after the others, in alphabetical order.

    There are none where only the user, or a list of files, can tell.
    """
    *before, current = [word for word in words if word != "="]
    if words[-1] == "=":  # bash takes --option= apart
        before, current = [*before, current], ""
    command, arguments, option = _place(root, before)
    found: Iterable[str] = ()
    start = ""
    if option is None and current.startswith("-") and "=" in current:
        name, _, current = current.partition("=")
        option, start = _option(command, name), f"{name}="
    if option is not None:
        found = VALUES.get(option.name, tuple)()
    elif current.startswith("-"):
        found = _names(command)
    elif hasattr(command, "commands"):
        known = {} if arguments else command.commands
        found = (name for name, one in known.items() if not one.hidden)
    elif arguments < len(positional := _positional(command)):
        found = VALUES.get(positional[arguments].name, tuple)()
    return sorted({f"{start}{one}" for one in map(str, found) if one.startswith(current)})


def _place(root: Any, words: Sequence[str]) -> tuple[Any, int, Any]:
    """Return the command that words lead to, and how many arguments it has by then.

    The third value is the option that waits for its value, or None.
    """
    command, arguments, option = root, 0, None
    for word in words:
        if option is not None:
            option = None
        elif word.startswith("-") and word != "-":
            known = None if "=" in word else _option(command, word)
            option = known if known is not None and not known.is_flag else None
        elif word in getattr(command, "commands", {}):
            command = command.commands[word]
        else:
            arguments += 1
    return command, arguments, option


def _option(command: Any, name: str) -> Any:
    return next((one for one in command.params if name in (*one.opts, *one.secondary_opts)), None)


def _names(command: Any) -> Iterable[str]:
    shown = [one for one in command.params if not getattr(one, "hidden", False)]
    found = (name for one in shown for name in (*one.opts, *one.secondary_opts))
    return ["--help", *(name for name in found if name.startswith("--"))]


def _positional(command: Any) -> list[Any]:
    return [one for one in command.params if one.param_type_name == "argument"]
