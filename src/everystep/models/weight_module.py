"""The weights of a model that learns as a plain `torch.nn.Module`, for what takes such a module:
optimisers, `torch.compile`, `DistributedDataParallel` and `fully_shard`.

Its parameters are the model's own, so both always have the same values. What wraps a module may put
other tensors in their places: parts of them between two forwards, whole ones within. The model
follows, and refuses to compute with parts. Of a decoder each layer is a module that is called when
the layer runs, so that what wraps it sees that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import takewhile
from typing import Any, TypeVar, cast, final

import torch
from torch import Tensor, nn

from everystep.errors import InvariantError, RequestError, UnsupportedError, shown
from everystep.models.decoder import Decoder
from everystep.models.load import learning_parts
from everystep.models.model import Model
from everystep.models.parameters import ParameterPart

PartT = TypeVar("PartT")


@final
@dataclass(frozen=True, slots=True, eq=False)
class Within:
    """A call that reads weights, to be made while the module that has them runs."""

    call: Callable[[], object]


@final
class WeightModule(nn.Module):
    """A module whose parameters have the names of a checkpoint; `call` is the model's forward.

    Values in its `state_dict` lie as in a checkpoint, and `load_state_dict` reads them so.
    """

    loss_type: str | None
    """Of a decoder "ForCausalLM": with that name transformers' Trainer counts labels as they are
    trained on, the first of a row not among them."""

    def __init__(self, model: Model, call: Callable[..., object]) -> None:
        super().__init__()
        self.loss_type = None if model.network.encodes else "ForCausalLM"
        self._call = call
        self._turned: dict[str, ParameterPart] = {}
        self._places: list[tuple[nn.Module, str]] = []
        self._followed: list[Tensor] = []
        tree: dict[str, Any] = {}
        for part, weight in learning_parts(model):
            at = tree
            *path, leaf = part.name.split(".")
            for one in path:
                at = at.setdefault(one, {})
            at[leaf] = weight
            self._followed.append(weight)
            if part.transposed or part.interleaved is not None:
                self._turned[part.name] = part
        places = _layer_places(model)
        _fill(self, tree, frozenset(places))
        for part, _ in learning_parts(model):
            owner, _, leaf = part.name.rpartition(".")
            self._places.append((self.get_submodule(owner), leaf))
        self._layers = [self._layer_at(place) for place in places]
        self.register_state_dict_post_hook(_as_stored)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_as_loaded)  # type: ignore[no-untyped-call]

    def _layer_at(self, place: str) -> LayerModule:
        made = self.get_submodule(place)
        if not isinstance(made, LayerModule):
            raise InvariantError("a layer has another module", got=type(made).__name__)
        inside = {*made.modules()}
        own = [n for n, (owner, _) in enumerate(self._places) if owner in inside]
        made.weights_of_now = lambda: {
            id(self._followed[n]): getattr(*self._places[n]) for n in own
        }
        return made

    def around_layers(self, model: Model) -> Model:
        """Return the model for a forward in which each layer is run by its module, with the weights
        that it has then; itself where layers have none."""
        if not self._layers or not isinstance(model.network, Decoder):
            return model
        return replace(model, network=replace(model.network, around=tuple(self._layers)))

    @property
    def gathers_layers(self) -> bool:
        """True where each layer gathers its weights when it runs, and this module, when it is
        called, those outside of layers if they lie in parts too."""
        apart = {id(weight) for layer in self._layers for weight in layer.parameters()}
        outside = [one for one in self.parameters() if id(one) not in apart]
        whole = not any(hasattr(one, "full_tensor") for one in outside)
        return bool(self._layers) and all(map(gathers, self._layers)) and (whole or gathers(self))

    def forward(
        self,
        input_ids: Tensor | Within | None = None,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        use_cache: bool = False,
        **arguments: object,
    ) -> object:
        """Return the model's output, without a cache unless that is asked for; or what a call
        gives that is made `Within`.

        `labels` stand in the signature because transformers' Trainer drops columns whose names do
        not. `arguments`: the others of the model. RequestError for adapters, whose tensors are not
        among the parameters, so that nothing that wraps the module would see their gradients.
        """
        if isinstance(input_ids, Within):
            return input_ids.call()
        for name in ("adapter_names", "adapters"):
            if arguments.get(name) is not None:
                raise RequestError(
                    "the parameters of this module are the model's own weights, not an adapter's",
                    wanted=f"no {name}",
                    got=shown(arguments[name]),
                    do="Call the model itself, or train the adapter with everystep.Trainer",
                )
        if labels is not None:
            arguments["labels"] = labels
        return self._call(input_ids, attention_mask, use_cache=use_cache, **arguments)

    @property
    def turned(self) -> Mapping[str, ParameterPart]:
        """The parts that lie otherwise in a checkpoint than in the network, by name."""
        return self._turned

    def followed(self, model: Model) -> Model:
        """Return the model with the tensors that are in the places of its weights now; itself where
        they are those that it has."""
        found = [getattr(owner, leaf) for owner, leaf in self._places]
        if all(one is other for one, other in zip(found, self._followed, strict=True)):
            return model
        pairs = zip(self._followed, found, strict=True)
        made = with_tensors(model, {id(old): new for old, new in pairs})
        own = [weight for _, weight in learning_parts(made)]
        if any(one is not other for one, other in zip(own, found, strict=True)):
            raise UnsupportedError(
                "a network of this kind cannot take other tensors in place of its weights",
                got=type(model.network).__name__,
                do="Change the values of its parameters, and leave the parameters in their places",
            )
        self._followed = found
        return made

    @property
    def lies_in_parts(self) -> bool:
        """True where a weight lies in parts on several processes."""
        return any(hasattr(one, "full_tensor") for one in self.parameters())

    def gathered(self, model: Model) -> Model:
        """Return the followed model with copies of the weights of now, those that lie in parts
        gathered, which all processes ask for at the same time."""
        with torch.no_grad():
            whole = {
                id(one): one.full_tensor()
                for one in self.parameters()
                if hasattr(one, "full_tensor")
            }
        return with_tensors(model, whole)

    def require_whole(self, *, but_layers: bool = False) -> None:
        """Raise RequestError where a weight lies in parts on several processes; `but_layers`: of
        layers they are whole when the layer runs, if something gathers them then."""
        names = [name for name, one in self.named_parameters() if hasattr(one, "full_tensor")]
        if but_layers:
            wrapped = [n for n, one in self.named_modules() if one in self._layers and gathers(one)]
            names = [name for name in names if not name.startswith(tuple(f"{n}." for n in wrapped))]
        if names:
            raise RequestError(
                "the weights lie in parts on several processes",
                wanted="whole weights",
                got=f"a part of {names[0]}",
                do="Call model.generate, es.generate or es.score on every process together, or "
                "unshard() of what was sharded, and reshard() afterwards; a forward is a call of "
                "the sharded module",
            )


@final
class LayerModule(nn.Module):
    """A module with the weights of one layer of a decoder, which is called when the layer runs.

    `weights_of_now`: gives the tensors in the places of its weights, by the `id` of those that the
    model has.
    """

    weights_of_now: Callable[[], Mapping[int, Tensor]]

    def forward(
        self, run: Callable[..., Tensor], layer: Callable[[], object], *given: object
    ) -> Tensor:
        """Return what `run` makes with the layer, whose weights are those of now.

        `layer` gives it: tensors that stand in arguments are others here, since `fully_shard` puts
        a node of the graph between.
        """
        return run(with_tensors(layer(), self.weights_of_now()), *given)


def gathers(module: nn.Module) -> bool:
    """Return whether a module gathers weights that lie in parts when it is called, by FSDP2."""
    return is_one(module, "FSDPModule")


def is_one(module: nn.Module, name: str) -> bool:
    """Return whether a module is of a class of this name, which is not imported to find that out:
    it takes seconds."""
    return any(kind.__name__ == name for kind in type(module).__mro__)


def _layer_places(model: Model) -> list[str]:
    """Return the name below which all weights of a layer lie and no others, of each layer of a
    decoder; none where one has no such name."""
    layers = model.network.layers if isinstance(model.network, Decoder) else ()
    names = {id(weight): part.name for part, weight in learning_parts(model)}
    found: dict[str, int] = {}
    for layer in layers:
        own = [names[one] for one in _tensors_in(layer) if one in names]
        paths = [name.split(".") for name in own]
        both = takewhile(lambda pair: pair[0] == pair[1], zip(min(paths), max(paths), strict=False))
        found[".".join(one for one, _ in both)] = len(own)
    for place, count in found.items():
        if not place or count != sum(one.startswith(f"{place}.") for one in names.values()):
            return []
    return list(found) if len(found) == len(layers) else []


def _tensors_in(part: object) -> set[int]:
    """Return the `id` of each tensor in a part of a model."""
    if isinstance(part, Tensor):
        return {id(part)}
    if is_dataclass(part) and not isinstance(part, type):
        part = tuple(getattr(part, one.name) for one in fields(part) if one.init)
    return {one for each in part for one in _tensors_in(each)} if type(part) is tuple else set()


def with_tensors(part: PartT, changed: Mapping[int, Tensor]) -> PartT:
    """Return a model, or a part of one, with other tensors in place of those that have these
    `id`s; itself where it has none of them."""
    return cast(PartT, _changed(part, changed))


def _changed(part: Any, changed: Mapping[int, Tensor]) -> Any:
    if isinstance(part, Tensor):
        return changed.get(id(part), part)
    if type(part) is tuple:
        each = tuple(_changed(one, changed) for one in part)
        same = all(one is other for one, other in zip(each, part, strict=True))
        return part if same else each
    if not is_dataclass(part) or isinstance(part, type):
        return part
    own = {one.name: getattr(part, one.name) for one in fields(part) if one.init}
    found = {name: _changed(one, changed) for name, one in own.items()}
    other = {name: one for name, one in found.items() if one is not own[name]}
    return replace(part, **other) if other else part


def _fill(
    module: nn.Module, tree: Mapping[str, Any], layers: frozenset[str], above: str = ""
) -> None:
    """Put tensors and modules of a tree into a module, by name; those of `layers` are such."""
    for name, one in tree.items():
        if isinstance(one, nn.Parameter):
            module.register_parameter(name, one)
            continue
        numbered = all(str(number) == key for number, key in enumerate(one))
        plain = LayerModule if above + name in layers else nn.Module
        module.add_module(name, nn.ModuleList() if numbered else plain())
        _fill(module.get_submodule(name), one, layers, f"{above}{name}.")


def _as_stored(module: Any, values: dict[str, Any], prefix: str, _: object) -> None:
    for name, part in module.turned.items():
        if prefix + name in values:
            values[prefix + name] = part.stored_values(values[prefix + name])


def _as_loaded(module: Any, values: dict[str, Any], prefix: str, *_: object) -> None:
    for name, part in module.turned.items():
        if prefix + name in values:
            found = values[prefix + name]
            values[prefix + name] = part.loaded(found.T if part.transposed else found)
