"""Programs that use apex.amp, rewritten to torch.amp: they run, and train as if written by hand."""

from __future__ import annotations

import json
import types

import pytest
import torch

from amp_compat.migrate.names import TARGETS
from amp_compat.migrate.notebook import migrate_notebook
from amp_compat.migrate.source import migrate_source

TORCH = TARGETS["torch.amp"]

PLAIN = '''"""A plain loop."""
import torch
from apex import amp  # mixed precision

# Initialization
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")

for x, y in data:
    optimizer.zero_grad()
    # forward
    out = model(x)
    loss = torch.nn.functional.mse_loss(out, y)
    # backward
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()  # scaled
    optimizer.step()  # the step
    seen.append(loss.item())
'''

PLAIN_WRITTEN = '''"""A plain loop."""
import torch

# Initialization
scaler = torch.amp.GradScaler("cuda")

for x, y in data:
    optimizer.zero_grad()
    # forward
    with torch.amp.autocast("cuda", dtype=torch.float16):
        out = model(x)
        loss = torch.nn.functional.mse_loss(out, y)
    # backward
    scaler.scale(loss).backward()  # scaled
    scaler.step(optimizer)  # the step
    scaler.update()
    seen.append(loss.item())
'''

SWITCHED = """
import torch
from torch.nn.utils import clip_grad_norm_


def train(args, data, model, optimizer):
    \"\"\"Train the model.\"\"\"
    if args.fp16:
        try:
            from apex import amp
        except ImportError:
            raise ImportError("Please install apex")
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.level)
    for step, (x, y) in enumerate(data):
        model.train()
        out = model(x)
        loss = torch.nn.functional.mse_loss(out, y)
        if args.accumulate > 1:
            loss = loss / args.accumulate
        if args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        if (step + 1) % args.accumulate == 0:
            if args.fp16:
                clip_grad_norm_(amp.master_params(optimizer), args.max_norm)
            else:
                clip_grad_norm_(model.parameters(), args.max_norm)
            optimizer.step()
            model.zero_grad()


train(args, data, model, optimizer)
"""

SPLIT = """
import torch
from apex import amp, parallel


def main(model, optimizer):
    \"\"\"Run.\"\"\"
    model, optimizer = amp.initialize(model, optimizer, opt_level='O2', loss_scale='dynamic', verbosity=0)
    for epoch in range(1):
        train(data, model, torch.nn.functional.mse_loss, optimizer)
        state = {"amp": amp.state_dict()}
        amp.load_state_dict(state["amp"])


def train(loader, model, criterion, optimizer):
    for x, y in loader:
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer, delay_unscale=False) as scaled:
            print(scaled.item())
            scaled.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.max_norm)
        optimizer.step()


main(model, optimizer)
"""

OBJECT = """
import torch
import apex.amp as amp


class Trainer:
    def __init__(self, model, optimizer, fp16):
        self.model, self.optimizer, self.fp16 = model, optimizer, fp16
        if fp16:
            self.model, self.optimizer = amp.initialize(self.model, self.optimizer)

    def fit(self, x, y):
        self.optimizer.zero_grad()
        prediction = self.model(x)
        loss = torch.nn.functional.mse_loss(prediction, y)
        if self.fp16:
            with amp.scale_loss(loss, self.optimizer) as scaled_loss: scaled_loss.backward()
            torch.nn.utils.clip_grad_norm_(amp.master_params(self.optimizer), args.max_norm)
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), args.max_norm)
        self.optimizer.step()


trainer = Trainer(model, optimizer, args.fp16)
for x, y in data:
    trainer.fit(x, y)
"""

PROGRAMS = {"plain": PLAIN, "switched": SWITCHED, "split": SPLIT, "object": OBJECT}


def parts():
    """A model, its optimizer and eight batches; the same at each call."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, [(torch.randn(8, 6), torch.randn(8, 2)) for _ in range(8)]


def trained(source, **options):
    """Run `source` on the CPU in place of a GPU; return the weights that it leaves."""
    model, optimizer, data = parts()
    args = types.SimpleNamespace(**{"fp16": True, "level": "O1", "accumulate": 1, "max_norm": 0.1, **options})
    text = source.replace("'cuda'", '"cuda"').replace('"cuda"', '"cpu"').replace("float16", "bfloat16")
    names = {"model": model, "optimizer": optimizer, "data": data, "args": args, "seen": []}
    exec(compile(text, "<rewritten>", "exec"), {**names, "__name__": "program"})
    return [p.detach() for p in model.parameters()]


def by_hand(*, enabled=True, accumulate=1, max_norm=None):
    """Train as torch's documentation says."""
    model, optimizer, data = parts()
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    for step, (x, y) in enumerate(data):
        with torch.amp.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = torch.nn.functional.mse_loss(model(x), y)
        scaler.scale(loss / accumulate).backward()
        if (step + 1) % accumulate == 0:
            if max_norm is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def test_a_plain_loop_word_for_word() -> None:
    """Comments move or vanish, the region covers too much, the import stays."""
    result = migrate_source(PLAIN, TORCH)
    assert result.text == PLAIN_WRITTEN
    assert {f.level for f in result.findings} == {"changed"}
    assert [f.line for f in result.findings] == [6, 14]


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_of_apex_is_left_and_a_second_run_changes_nothing(name) -> None:
    """Half of a program still asks for apex, or the rewrite is rewritten again."""
    once = migrate_source(PROGRAMS[name], TORCH)
    assert "amp." not in once.text.replace("torch.amp.", "")
    assert "scaler.step(" in once.text
    assert not [f for f in once.findings if f.level == "manual"]
    assert migrate_source(once.text, TORCH).text == once.text


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("plain", {}, {}),
        ("switched", {}, {"max_norm": 0.1}),
        ("switched", {"accumulate": 4}, {"max_norm": 0.1, "accumulate": 4}),
        ("switched", {"fp16": False}, {"max_norm": 0.1, "enabled": False}),
        ("switched", {"level": "O0"}, {"max_norm": 0.1, "enabled": False}),
        ("split", {}, {"max_norm": 0.1}),
        ("object", {}, {"max_norm": 0.1}),
        ("object", {"fp16": False}, {"max_norm": 0.1, "enabled": False}),
    ],
)
def test_a_rewritten_program_trains_as_one_written_by_hand(name, options, expected) -> None:
    """Gradients are clipped while scaled, steps taken on scaled ones, or the loss is out of the region."""
    text = migrate_source(PROGRAMS[name], TORCH).text.replace("from apex import parallel\n", "")
    for ours, theirs in zip(trained(text, **options), by_hand(**expected), strict=True):
        assert torch.equal(ours, theirs)


ALTERNATING = PLAIN.replace(
    """    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()  # scaled
""",
    """    if len(seen) % 2:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    else:
        loss.backward()
""",
)


def test_a_loss_of_the_other_branch_is_scaled_unless_the_scaler_is_off_there() -> None:
    """The step divides gradients by a scale that their loss was never multiplied with, so they vanish."""
    for ours, theirs in zip(trained(migrate_source(ALTERNATING, TORCH).text), by_hand(), strict=True):
        assert torch.equal(ours, theirs)
    for condition in ("len(seen) % 2", "not (len(seen) % 2)"):
        guarded = ALTERNATING.replace("model, optimizer =", f"if {condition}:\n    model, optimizer =")
        text = migrate_source(guarded, TORCH).text
        assert ("else:\n        loss.backward()" in text) == (not condition.startswith("not"))


@pytest.mark.parametrize(
    ("options", "enabled"),
    [
        ('"O1", enabled=torch.cuda.is_available()', "torch.cuda.is_available()"),
        ('"O1", enabled=bool(args.a)', "bool(args.a)"),
        ('"O1", enabled=(args.a or b) and (args.c)', "(args.a or b) and (args.c)"),
        ('args.level or "O1"', '(args.level or "O1") != "O0"'),
        ('"O1" if a else "O0"', '("O1" if a else "O0") != "O0"'),
        ("args.level, enabled=a or b", '(a or b) and args.level != "O0"'),
        ('"O0", enabled=a', "False"),
    ],
)
def test_the_condition_of_a_scaler_keeps_its_meaning(options: str, enabled: str) -> None:
    """A call loses its parentheses and is always true; or an operator takes the wrong operands."""
    text = migrate_source(PLAIN.replace('"O1"', options), TORCH).text
    assert f'\nscaler = torch.amp.GradScaler("cuda", enabled={enabled})\n' in text


def test_a_program_of_one_step() -> None:
    """The region begins before the scaler that says whether it is enabled."""
    source = PLAIN.replace("for x, y in data:\n", "x, y = data[0]\n").replace("\n    ", "\n")
    source = source.replace("scaled_loss:\n", "scaled_loss:\n    ").replace('"O1"', "args.level")
    text = migrate_source(source, TORCH).text
    assert "\nscaler = torch.amp.GradScaler(" in text
    assert not torch.equal(trained(text)[0], parts()[0][0].weight)


def test_comments_and_branches_stay() -> None:
    """A comment of a statement that goes is lost, or a loss that is made in branches is not found."""
    branches = """    if y is None:
        loss = model.forward(x)
    else:
        loss = criterion(model(x), y)
"""
    source = PLAIN[: PLAIN.index("    # forward")] + branches
    source += """    with amp.scale_loss(loss, optimizer) as scaled_loss:  # why
        # how
        scaled_loss.backward()
        # what then
    optimizer.step()
"""
    text = migrate_source(source.replace("from apex", "# for speed\nfrom apex"), TORCH).text
    assert "import torch\n# for speed\n\n# Initialization\n" in text
    indented = "".join(f"    {line}\n" for line in branches.splitlines())
    region = '    with torch.amp.autocast("cuda", dtype=torch.float16):\n'
    scaled = "    # why\n    # how\n    scaler.scale(loss).backward()\n    # what then\n"
    assert region + indented + scaled + "    scaler.step(optimizer)\n" in text


def test_other_imports_of_apex_stay() -> None:
    """``from apex import amp, parallel`` loses both."""
    assert "\nfrom apex import parallel\n" in migrate_source(SPLIT, TORCH).text


def test_what_runs_otherwise_is_said() -> None:
    """A level or a scale that torch.amp does not know is dropped in silence."""
    fixed = PLAIN.replace('"O1"', '"O2", loss_scale=128.0') + "\nwith torch.no_grad():\n    model(x)\n"
    (initialize, *_) = migrate_source(fixed, TORCH).findings
    assert initialize.level == "review"
    assert "init_scale=128.0" in migrate_source(fixed, TORCH).text
    for said in (
        "each use casts the float32 weight",
        "starts at 128.0 and then changes",
        "elsewhere model(...) runs in float32",
    ):
        assert said in initialize.message
    (initialize, *_) = migrate_source(SWITCHED, TORCH).findings
    assert "args.level now only selects O0 or not" in initialize.message
    states = [f for f in migrate_source(SPLIT, TORCH).findings if f.name == "apex.amp.load_state_dict"]
    assert "use different keys" in states[0].message


STEP = "    optimizer.step()  # the step\n"
BACKWARD = (
    "    with amp.scale_loss(loss, optimizer) as scaled_loss:\n        scaled_loss.backward()  # scaled\n"
)
REFUSED = {
    "O3": (PLAIN.replace('"O1"', '"O3"'), "model.half()"),
    "another option": (PLAIN.replace('"O1"', '"O1", cast_model_outputs=t'), "cast_model_outputs"),
    "several losses": (PLAIN.replace("loss, optimizer)", "loss, optimizer, loss_id=1)"), "more than a loss"),
    "several optimizers": (
        PLAIN.replace("(model, optimizer, opt", "(model, [optimizer, other], opt"),
        "must be assigned to the same names",
    ),
    "two optimizers": (
        PLAIN + PLAIN[PLAIN.index("for x") :].replace("optimizer", "other"),
        "more than one optimizer",
    ),
    "splat": (PLAIN.replace('opt_level="O1"', "**options"), "only at run time"),
    "another name": (
        PLAIN.replace("model, optimizer = amp", "net, optimizer = amp"),
        "must be assigned to the same names",
    ),
    "no step here": (PLAIN.replace(STEP, "    take(optimizer)\n"), "does not call optimizer.step()"),
    "a step elsewhere": (PLAIN + "\ndef take(optimizer):\n    optimizer.step()\n", "outside the function"),
    "another loss in the other branch": (
        ALTERNATING.replace("        loss.backward", "        other.backward"),
        "not scaled",
    ),
    "a loss that is not scaled": (PLAIN.replace(STEP, "    other.backward()\n" + STEP), "not scaled"),
    "no name": (PLAIN.replace("as scaled_loss:", "as self.loss:"), "as name"),
    "a closure": (PLAIN.replace("optimizer.step()", "optimizer.step(closure)"), "without arguments"),
    "no forward here": (PLAIN.replace("model(x)", "predict(x)"), "no forward pass of model"),
    "gradients ahead": (
        PLAIN.replace("    # forward", "    for p in ps: p.grad = None\n    # forward"),
        "read outside",
    ),
    "gradients after each backward": (
        PLAIN.replace(STEP, "    clip_grad_norm_(ps, 1)\n    if last:\n        optimizer.step()\n"),
        "read outside",
    ),
    "gradients after the step": (PLAIN.replace(STEP, STEP + "    print(p.grad)\n"), "read outside"),
    "a function handed on": (PLAIN + "register(amp.scale_loss)\n", "without being called"),
    "the module handed on": (PLAIN + "register(amp)\n", "used as an object"),
    "its other functions": (PLAIN + "amp.half_function(f)\n", "no equivalent of amp.half_function"),
    "a fallback that matters": (
        PLAIN.replace(
            "from apex import amp  # mixed precision",
            "try:\n    from apex import amp\nexcept ImportError:\n    fp16 = False",
        ),
        "may matter",
    ),
    "a name that may be None": (
        PLAIN.replace(
            "from apex import amp  # mixed precision",
            "try:\n    from apex import amp\nexcept ImportError:\n    amp = None",
        ),
        "`amp` is also assigned here",
    ),
    "no loss": ("from apex import amp\nmodel = amp.initialize(model)\n", "no loss is scaled"),
    "initialized elsewhere": (PLAIN.replace("model, optimizer = amp.init", "# "), "called 0 times"),
    "both": (PLAIN + "with torch.cuda.amp.autocast():\n    pass\n", "uses both apex.amp"),
    "both, in current names": (PLAIN + "with torch.autocast('cuda'):\n    pass\n", "uses both apex.amp"),
    "both, imported": (PLAIN + "from torch.amp import GradScaler\n", "uses both apex.amp"),
    "on one line": (PLAIN.replace(STEP, "    if last: optimizer.step()\n"), "separate statement"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_followed_is_left_whole(why) -> None:
    """A program is half rewritten, or with another meaning, and nobody is told."""
    source, reason = REFUSED[why]
    compile(source, why, "exec")
    result = migrate_source(source, TORCH)
    kept = source.replace("torch.cuda.amp.autocast()", "torch.amp.autocast('cuda')")
    assert result.text.replace('"cuda"', "'cuda'") == kept
    manual = [f for f in result.findings if f.level == "manual"]
    assert any(reason in f.message for f in manual), manual
    assert migrate_source(result.text, TORCH).text == result.text, "a second run rewrites it after all"


def test_functions_in_a_branch_share_a_scaler_of_the_module() -> None:
    """Where no function stands at the margin, there is no place for the scaler."""
    inner = SPLIT[SPLIT.index("def main(model") :]
    source = "import torch\nfrom apex import amp\nif True:\n"
    source += "".join(f"    {line}\n" if line else "\n" for line in inner.splitlines())
    for ours, theirs in zip(trained(migrate_source(source, TORCH).text), by_hand(max_norm=0.1), strict=True):
        assert torch.equal(ours, theirs)


def test_a_name_that_other_files_take_from_here_stays() -> None:
    """Another file's ``from program import amp`` fails."""
    result = migrate_source(PLAIN, TORCH, exported={"amp"})
    assert result.text == PLAIN
    assert any("other files import amp from here" in f.message for f in result.findings)


def notebook(*cells):
    """The text of a notebook of code cells."""
    made = [{"cell_type": "code", "metadata": {}, "outputs": [], "source": cell} for cell in cells]
    return json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


def test_a_notebook_is_rewritten_cell_by_cell() -> None:
    """Statements move to another cell, or a region begins in one and ends in another."""
    head, loop = PLAIN.split("for x, y", 1)
    first, second = head.split("# Initialization")
    result = migrate_notebook(notebook(first, second.strip(), "for x, y" + loop), TORCH)
    cells = [cell["source"] for cell in json.loads(result.text)["cells"]]
    assert cells[1] == 'scaler = torch.amp.GradScaler("cuda")'
    assert cells[2] == "for x, y" + PLAIN_WRITTEN.split("for x, y", 1)[1]
    assert "apex" not in result.text
    start = head.rstrip() + "\nout = model(x)"
    rest = "loss = out.sum()\nwith amp.scale_loss(loss, optimizer) as s:\n    s.backward()\noptimizer.step()"
    cut = notebook(start, rest)
    left = migrate_notebook(cut, TORCH)
    assert left.text == cut
    assert any("spans several cells" in f.message and f.cell == 2 for f in left.findings)
