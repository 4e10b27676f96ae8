"""`delayed_scales`: keep the histories that delayed scales of a model's products follow from."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from amp_core._torch.tracing import uncompared, untraced
from amp_core.casts.history_steps import follow_optimizers
from amp_core.common.arguments import check_group, check_module, check_optimizer
from amp_core.common.call_site import level_outside
from amp_core.common.handle import Local
from amp_core.common.identity import WeakIdentityMapping
from amp_core.common.locks import new_lock
from amp_core.common.optimizers import leaves_weights, parameters_of
from amp_core.dispatch.sources import history_sources
from amp_core.errors import AmpWarning
from amp_core.formats import AmaxHistory, Delayed
from amp_core.formats.history import check_saved
from amp_core.policy.recipes import ROLES


class DelayedScales(Local):
    """The histories of one model; a context manager in which its products use them.

    Attributes:
        model: the model.
    """

    _INSTEAD = " Its histories are in state_dict(), which delayed_scales(copy).load_state_dict() takes over."

    def __init__(self, model: nn.Module, process_group: torch.distributed.ProcessGroup | None = None) -> None:
        check_module(model, "delayed_scales")
        self.model = model
        self._group = None if process_group is None else check_group(process_group)
        self._weights: dict[int, tuple[str, Tensor]] = {}  # kept alive, so that no `id` is reused
        self._histories: dict[str, dict[str, AmaxHistory]] = {}
        self._loaded: dict[str, dict[str, AmaxHistory]] = {}  # until a product tells its recipe
        self._agreed: MutableMapping[torch.optim.Optimizer, Tensor] = WeakIdentityMapping()
        self._past: dict[tuple[str, ...], list[Tensor]] = {}  # by the names of an optimizer's weights
        self._release: Any = None
        self._lock = new_lock()
        self.look_again()

    @untraced
    def __enter__(self) -> DelayedScales:
        if self._release is not None:
            raise RuntimeError("These delayed_scales are already active. Enter them once at a time.")
        follow_optimizers()
        self._release = history_sources.register(self)
        return self

    @untraced
    def __exit__(self, *_: object) -> None:
        if self._release is None:
            raise RuntimeError("These delayed_scales were left without having been entered.")
        self._release()
        self._release = None

    def look_again(self) -> None:
        """Find the parameters that the model has now; see `HistorySource`."""
        named = self.model.named_parameters()
        weights: dict[int, tuple[str, Tensor]] = {id(weight): (name, weight) for name, weight in named}
        with self._lock:
            known = self._weights
            moved = {known[key][0]: name for key, (name, _) in weights.items() if key in known}
            if any(old != new for old, new in moved.items()):
                self._move(moved)
            self._weights = weights

    def _move(self, moved: Mapping[str, str]) -> None:
        """Let histories follow weights to other names, as of a layer before which another was inserted.

        Other names keep theirs: a weight that replaces one, as ``load_state_dict(assign=True)`` does, goes on
        with its history.
        """
        taken = {*moved.values()}

        def now(name: str) -> str:  # "" if its weight has left the model, and another has the name
            return moved.get(name, "" if name in taken else name)

        self._histories = {now(name): roles for name, roles in self._histories.items()}
        self._loaded = {now(name): roles for name, roles in self._loaded.items()}
        self._past = {tuple(map(now, names)): past for names, past in self._past.items()}

    def history(self, weight: Tensor, role: str, delayed: Delayed) -> AmaxHistory | None:
        """Return the history of one role of the products of `weight`; None if it is not the model's.

        Raises:
            ValueError: it was created, or loaded, with another length.
        """
        known = self._weights.get(id(weight))
        if known is None:
            return None
        name = known[0]
        history = self._histories.get(name, {}).get(role)
        if history is None:
            with self._lock, uncompared():
                roles = self._histories.setdefault(name, {})
                # What a signal handler, or the thread before in this lock, has made stays.
                history = roles.setdefault(role, self._new(name, role, delayed, weight.device))
                self._loaded.get(name, {}).pop(role, None)
        if history.delayed != delayed:
            raise ValueError(
                f"The {role} of {name} has a history for {history.delayed}, and is now quantised "
                f"with {delayed}: use one recipe for the products of a weight."
            )
        return history

    @torch.no_grad()
    def _new(self, name: str, role: str, delayed: Delayed, device: torch.device) -> AmaxHistory:
        history = AmaxHistory(delayed, device)
        loaded = self._loaded.get(name, {}).get(role)
        if loaded is not None:
            history.load_state_dict(loaded.state_dict())
            return history
        for amax in self._agreed_on(name, role)[-delayed.history :]:  # by ranks that used it before
            history.settle(amax)
            history.step()
        return history

    def _agreed_on(self, name: str, role: str) -> list[Tensor]:
        """Return the largest magnitudes of all ranks in the steps so far, the newest last."""
        pasts = [
            (past, len(ROLES) * names.index(name) + ROLES.index(role))
            for names, past in self._past.items()
            if name in names
        ]
        return [largest[slot] for past, slot in pasts for largest in past]

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """End a step of the histories; optimizers do this after their own.

        With a process group, its ranks agree on the largest magnitudes first, unless a `GradScaler` let them
        do so when they decided on the step.

        Args:
            optimizer: limits it to the weights that it has. If its learning rates are 0 and there were no
                products of them, nothing ends.

        Raises:
            TypeError: `optimizer` is no optimizer.
        """
        if optimizer is not None:
            check_optimizer(optimizer, "DelayedScales.step")
        largest = None if optimizer is None else self._agreed.pop(optimizer, None)
        met = self._group is not None and largest is None  # other ranks may have met a new parameter
        if met or (optimizer is not None and not self._has_all_of(optimizer)):
            self.look_again()  # FSDP2 replaces parameters by gathered ones while a module runs
        names = self._names_of(optimizer)
        if self._group is not None and largest is None:
            largest = self._agree(names, self._group)
        if optimizer is not None and leaves_weights(optimizer):
            seen = self._largest(names) if largest is None else largest
            if not bool(seen.any()):  # a step by which torch reads or sets its states
                return
        if largest is not None:
            past = self._past.setdefault(names, [])
            past.append(largest)
            del past[: -max([Delayed.history, *self._lengths()])]
        for name, role in _slots(names):
            history = self._known_history(name, role)
            if history is not None:
                history.step()

    def _lengths(self, *roles: str) -> set[int]:
        """Return the lengths of the histories of `roles`, by default all."""
        wanted, known = roles or ROLES, [*self._histories.values(), *self._loaded.values()]
        return {h.delayed.history for each in known for role, h in [*each.items()] if role in wanted}

    def _known_history(self, name: str, role: str) -> AmaxHistory | None:
        used = self._histories.get(name, {}).get(role)
        return self._loaded.get(name, {}).get(role) if used is None else used

    def _agree(self, names: tuple[str, ...], group: torch.distributed.ProcessGroup) -> Tensor:
        from torch import distributed

        largest = self._largest(names)
        distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=group)
        self._settle(names, largest)
        return largest

    def largest(self, optimizers: Sequence[torch.optim.Optimizer], ranks: Sequence[int]) -> Tensor | None:
        """Return what this rank contributes to the collective of a scaler; see `HistorySource`."""
        if self._group is None:
            return None
        from torch import distributed

        if distributed.get_process_group_ranks(self._group) != [*ranks]:
            return None
        self.look_again()
        return torch.cat([self._largest(self._names_of(optimizer)) for optimizer in optimizers])

    @torch.no_grad()
    def settle(self, largest: Tensor, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Take over what the ranks agreed on; see `HistorySource`."""
        names = [self._names_of(optimizer) for optimizer in optimizers]
        parts = torch.split(largest, [len(ROLES) * len(each) for each in names])
        for optimizer, of_it, part in zip(optimizers, names, parts, strict=True):
            self._agreed[optimizer] = part
            self._settle(of_it, part)

    def _settle(self, names: tuple[str, ...], largest: Tensor) -> None:
        for (name, role), amax in zip(_slots(names), largest.unbind(), strict=True):
            history = self._known_history(name, role)
            if history is not None:
                history.settle(amax)

    def _largest(self, names: tuple[str, ...]) -> Tensor:
        """Return one element per slot, also for those that only other ranks have a history for."""
        found = [self._known_history(name, role) for name, role in _slots(names)]
        device = next((weight.device for name, weight in self._weights.values() if name in names[:1]), None)
        none = torch.zeros((), dtype=torch.float32, device=device)
        rows = [none if each is None else each.current.to(none.device) for each in found]
        return torch.stack(rows) if rows else none.view(1)[:0]

    def _names_of(self, optimizer: torch.optim.Optimizer | None) -> tuple[str, ...]:
        if optimizer is None:
            return tuple(name for name, _ in self._weights.values())
        ids = set(map(id, parameters_of(optimizer)))
        return tuple(name for key, (name, _) in self._weights.items() if key in ids)

    def _has_all_of(self, optimizer: torch.optim.Optimizer) -> bool:
        return all(id(param) in self._weights for param in parameters_of(optimizer))

    @untraced
    def state_dict(self) -> dict[str, dict[str, dict[str, Tensor]]]:
        """Return copies of all histories: name of the weight -> role -> `AmaxHistory.state_dict`.

        The names are those that the weights have now; weights that have left the model are left out. Those
        that only other ranks of the process group have used are not, if the histories of a role have one
        length.
        """
        self.look_again()
        histories = {name: [*roles.items()] for name, roles in [*self._histories.items()]}
        kept = {name: {role: h.state_dict() for role, h in roles} for name, roles in histories.items()}
        waiting = {name: {role: h.state_dict() for role, h in r.items()} for name, r in self._loaded.items()}
        others = self._of_others()
        every = {
            name: {**others.get(name, {}), **waiting.get(name, {}), **kept.get(name, {})}
            for name in self._names_of(None)
        }
        return {name: roles for name, roles in every.items() if roles}

    def _of_others(self) -> dict[str, dict[str, dict[str, Tensor]]]:
        """Return the histories of what only other ranks have used, as `state_dict` does."""
        lengths = {role: self._lengths(role) for role in ROLES}
        recipes = {role: Delayed(max(found)) for role, found in lengths.items() if len(found) == 1}
        result: dict[str, dict[str, dict[str, Tensor]]] = {}
        for names, past in self._past.items():
            used = torch.stack(past).any(0).tolist()
            for name, role in itertools.compress(_slots(names), used):
                if role in recipes and self._known_history(name, role) is None:
                    history = self._new(name, role, recipes[role], past[0].device)
                    result.setdefault(name, {})[role] = history.state_dict()
        return result

    @untraced
    def load_state_dict(self, state: Mapping[str, Mapping[str, Mapping[str, Tensor]]]) -> None:
        """Take over what `state_dict` returned; the scales go on bit for bit.

        Raises:
            KeyError: the model has no parameter of this name, or an entry is missing.
            TypeError: it is another kind of state, such as that of the model.
            ValueError: a role is unknown, an entry is no history, or a history has another length than the
                recipe's, which the first product of the weight may tell.

        Warns:
            AmpWarning: it is empty.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"The state of delayed scales must be a mapping, got {type(state).__name__}.")
        if not state:
            warnings.warn(_EMPTY, AmpWarning, stacklevel=level_outside())
        self.look_again()
        unknown = sorted(map(str, {*state} - {*self._names_of(None)}))
        if unknown:
            raise KeyError(f"The model has no parameters {', '.join(unknown)}, whose histories were saved.")
        for name, saved in state.items():
            _check(name, saved)
            for role, history in self._histories.get(name, {}).items():
                if role in saved:
                    history.check(saved[role])
        self._past.clear()
        self._agreed.clear()
        self._loaded = {name: {role: _restored(s) for role, s in r.items()} for name, r in state.items()}
        for name, roles in self._histories.items():
            for role, history in [*roles.items()]:
                if role in self._loaded.get(name, {}):
                    history.load_state_dict(self._loaded[name].pop(role).state_dict())
                else:
                    del roles[role]


_EMPTY = (
    "The state of these delayed scales is empty, so their histories start anew. If dcp.load loaded it: it "
    "only loads entries that exist. Call the model in this scope, with a backward pass, before you load."
)


def _check(name: str, roles: Any) -> None:
    if not isinstance(roles, Mapping):
        raise TypeError(
            f"The state of {name} is {type(roles).__name__}, not a mapping from roles to histories: pass "
            f"what delayed_scales(model).state_dict() returned."
        )
    for role, state in roles.items():
        if role not in ROLES:
            raise ValueError(f"The state of {name} has {role!r}. Histories are of {', '.join(ROLES)}.")
        try:
            check_saved(state)
        except (KeyError, TypeError, ValueError) as error:
            raise type(error)(f"The {role} of {name}: {error.args[0]}") from None


def _restored(state: Mapping[str, Tensor]) -> AmaxHistory:
    """Return the saved history of a weight that may take part in no product before the next step."""
    seen = state["seen"]
    history = AmaxHistory(Delayed(history=seen.numel()), seen.device)
    history.load_state_dict(state)
    return history


def _slots(names: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(name, role) for name in names for role in ROLES]


@untraced
def delayed_scales(
    model: nn.Module, *, process_group: torch.distributed.ProcessGroup | None = None
) -> DelayedScales:
    """Keep the histories that the delayed scales of `model`'s products follow from.

    In this scope, recipes with `Delayed` scales, such as `Recipe.fp8_delayed`, work for ops whose second
    factor is a parameter of `model`. Each weight has a history of largest magnitudes for its input, itself
    and the gradient of its output; in a step they collect the largest of all micro-batches. When an optimizer
    that has the weight steps, the step of its histories ends too. Until then, and for weights that no
    optimizer has, scales follow from the tensors themselves. A step that a `GradScaler` skips on the host
    ends with the next one that lands; inf and NaN never enter a history. Code compiled by ``torch.compile``
    uses the same histories, but enter the scope outside of it.

    Args:
        model: the model.
        process_group: the ranks whose scales must be equal. They agree on the largest magnitudes: in the
            collective of a `GradScaler` that decides on the step with the same process group; else in one of
            their own after each step. All must step the same optimizers in the same order.

    Returns:
        A context manager with `state_dict` and `load_state_dict`. The same object can be entered again.

    Raises:
        TypeError: `model` is no module, or `process_group` no group that this rank is a member of.
        PolicyError: in the scope, by an op whose second factor is no parameter of the model; in compiled
            code when it runs.

    Example::

        from amp_core import OpPolicy, Recipe, autocast, delayed_scales

        model = torch.nn.Linear(16, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = OpPolicy.default("cpu").override({"linear": Recipe.fp8_delayed(history=16)})
        with delayed_scales(model) as scales:
            for _ in range(2):
                with autocast("cpu", dtype=torch.bfloat16, policy=policy):
                    loss = model(torch.randn(4, 16)).square().mean()
                loss.backward()
                optimizer.step()
        assert scales.state_dict()["weight"].keys() == {"input", "weight", "grad_output"}
    """
    return DelayedScales(model, process_group)
