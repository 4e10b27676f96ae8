"""What `amp migrate` makes of one module: rewritten text, findings, and a second run that changes nothing."""

from __future__ import annotations

import warnings

import pytest

from amp_compat.migrate.files import is_candidate
from amp_compat.migrate.names import TARGETS
from amp_compat.migrate.source import migrate_source

TORCH, CORE = TARGETS["torch.amp"], TARGETS["amp_core"]

REWRITES = {
    "inside an f-string": (
        "import torch\nprint(f\"{torch.cuda.amp.autocast()}\", f'{torch.cuda.amp.GradScaler()}')\n",
        "import torch\nprint(f\"{torch.amp.autocast('cuda')}\", f'{torch.amp.GradScaler(\"cuda\")}')\n",
    ),
    "a partial inside an f-string": (
        'import torch, functools\nprint(f"{functools.partial(torch.cuda.amp.autocast)}{(torch.cuda.amp.autocast if x else y)()}")\n',
        "import torch, functools\nprint(f\"{functools.partial(torch.amp.autocast, 'cuda')}"
        "{(functools.partial(torch.amp.autocast, 'cuda') if x else y)()}\")\n",
    ),
    "torch imported in the function": (
        "def f():\n    import torch\n    from torch.cuda.amp import autocast_mode\n    autocast_mode.autocast()\n",
        'def f():\n    import torch\n    torch.amp.autocast("cuda")\n',
    ),
    "a generator by position": (
        "import torch\ntorch.cuda.amp.autocast(on for on in switches)\n",
        'import torch\ntorch.amp.autocast("cuda", enabled=(on for on in switches))\n',
    ),
    "a name by itself": (
        "import torch\ntry:\n    torch.cuda.amp.autocast\n    ok = torch.cuda.amp is not None\nexcept AttributeError:\n    ok = False\n",
        "import torch\ntry:\n    torch.amp.autocast\n    ok = torch.amp is not None\nexcept AttributeError:\n    ok = False\n",
    ),
    "a test of whether the name is there": (
        "import torch\ntry:\n    _ = torch.cpu.amp.autocast\nexcept AttributeError:\n    pass\n",
        "import torch\ntry:\n    _ = torch.amp.autocast\nexcept AttributeError:\n    pass\n",
    ),
    "call with keywords": (
        "import torch\nwith torch.cuda.amp.autocast(enabled=cfg.amp):\n    pass\n",
        'import torch\nwith torch.amp.autocast("cuda", enabled=cfg.amp):\n    pass\n',
    ),
    "positional arguments get their names": (
        "import torch\nwith torch.cuda.amp.autocast(True, torch.float16, False):\n    pass\n",
        'import torch\nwith torch.amp.autocast("cuda", enabled=True, dtype=torch.float16, cache_enabled=False):\n'
        "    pass\n",
    ),
    "an assignment among positional arguments": (
        "import torch\nwith torch.cuda.amp.autocast(on := True, (low := torch.float16)):\n    pass\n",
        'import torch\nwith torch.amp.autocast("cuda", enabled=(on := True), dtype=(low := torch.float16)):\n    pass\n',
    ),
    "keyword splat stays": (
        "import torch\nctx = torch.cpu.amp.autocast(**options)\n",
        'import torch\nctx = torch.amp.autocast("cpu", **options)\n',
    ),
    "functions that are wrapped by hand": (
        "import torch\nfrom torch.cuda.amp import custom_fwd, custom_bwd\n"
        "forward = custom_fwd(run)\ncast = custom_fwd(run, cast_inputs=torch.float32)\n"
        "backward = custom_bwd(\n    back,\n)\n",
        "import torch\nfrom torch.amp import custom_fwd, custom_bwd\n"
        'forward = custom_fwd(run, device_type="cuda")\n'
        'cast = custom_fwd(run, device_type="cuda", cast_inputs=torch.float32)\n'
        'backward = custom_bwd(\n    back, device_type="cuda",\n)\n',
    ),
    "imported names": (
        "from torch.cuda.amp import autocast as autocast, GradScaler  # mixed precision\n"
        "scaler = GradScaler(2.0**10)\nwith autocast():\n    pass\n",
        "from torch.amp import autocast as autocast, GradScaler  # mixed precision\n"
        'scaler = GradScaler("cuda", 2.0**10)\nwith autocast("cuda"):\n    pass\n',
    ),
    "parenthesised import": (
        "from torch.cuda.amp import (\n    GradScaler,  # scaler\n    autocast,\n)\nGradScaler(); autocast()\n",
        "from torch.amp import (\n    GradScaler,  # scaler\n    autocast,\n)\n"
        'GradScaler("cuda"); autocast("cuda")\n',
    ),
    "comments of a split import": (
        "if on:\n    from torch.cuda.amp import (\n        GradScaler,  # the scaler\n        autocast,  # the region\n"
        "    )  # end\n    import torch\n    register(GradScaler), autocast()\n",
        "if on:\n    # the scaler\n    # the region\n    from torch.amp import autocast  # end\n"
        "    from torch.cuda.amp import (\n        GradScaler)\n    import torch\n"
        '    register(GradScaler), autocast("cuda")\n',
    ),
    "comments above an import that goes": (
        "import torch\n\n# the scaler\nfrom torch.cuda.amp import grad_scaler\n\n\n# a step\ndef f():\n"
        "    return grad_scaler.GradScaler()\n",
        'import torch\n\n# the scaler\n\n\n# a step\ndef f():\n    return torch.amp.GradScaler("cuda")\n',
    ),
    "comments above an import that goes at the end of a block": (
        "import torch\ndef f():\n    # one\n    x = torch.cuda.amp.GradScaler()\n"
        "    # two\n    from torch.cuda.amp import grad_scaler\n    # three\n",
        'import torch\ndef f():\n    # one\n    x = torch.amp.GradScaler("cuda")\n    # two\n    # three\n',
    ),
    "submodule imports": (
        "from torch.cuda.amp.autocast_mode import autocast\nfrom torch.cuda.amp.grad_scaler import GradScaler, OptState\n"
        "autocast(), GradScaler(), OptState.READY\n",
        "from torch.amp import autocast\nfrom torch.amp import GradScaler\nfrom torch.amp.grad_scaler import OptState\n"
        'autocast("cuda"), GradScaler("cuda"), OptState.READY\n',
    ),
    "module from torch.cuda": (
        "from torch.cuda import amp, nvtx\nwith amp.autocast(), nvtx.range('x'):\n    s = amp.GradScaler()\n",
        "from torch import amp\nfrom torch.cuda import nvtx\n"
        "with amp.autocast('cuda'), nvtx.range('x'):\n    s = amp.GradScaler('cuda')\n",
    ),
    "part of torch in a variable": (
        "import torch\ncuda = torch.cuda\nwith cuda.amp.autocast(False):\n    pass\n",
        'import torch\ncuda = torch.cuda\nwith torch.amp.autocast("cuda", enabled=False):\n    pass\n',
    ),
    "torch in a variable, then part of it in another": (
        "import torch\nt = torch\ndef f():\n    c = t.cuda\n    return c.amp.GradScaler(), t.cpu.amp.autocast()\n",
        'import torch\nt = torch\ndef f():\n    c = t.cuda\n    return torch.amp.GradScaler("cuda"), t.amp.autocast("cpu")\n',
    ),
    "module with an alias": (
        "import torch.cuda.amp as tamp\ntamp.autocast_mode.autocast(enabled=False)\n",
        'import torch.amp as tamp\ntamp.autocast("cuda", enabled=False)\n',
    ),
    "torch with an alias": (
        "import torch as th\nth.cuda.amp.GradScaler(enabled=x)\n",
        'import torch as th\nth.amp.GradScaler("cuda", enabled=x)\n',
    ),
    "torch.cuda with an alias needs torch": (
        "import torch.cuda as tc\nscaler = tc.amp.GradScaler()\n",
        'import torch.cuda as tc\nimport torch\nscaler = torch.amp.GradScaler("cuda")\n',
    ),
    "one argument per line": (
        "import torch\nctx = torch.cuda.amp.autocast(\n    enabled=True,  # on\n    dtype=torch.float16,\n)\n",
        'import torch\nctx = torch.amp.autocast(\n    "cuda",\n    enabled=True,  # on\n    dtype=torch.float16,\n)\n',
    ),
    "decorators": (
        "from torch.cuda.amp import autocast, custom_bwd, custom_fwd\nimport torch\n"
        "class F(torch.autograd.Function):\n    @staticmethod\n    @custom_fwd\n    def forward(ctx, x):\n        return x\n"
        "    @staticmethod\n    @custom_bwd\n    def backward(ctx, g):\n        return g\n"
        "@custom_fwd(cast_inputs=torch.float32)\ndef f(ctx): ...\n@autocast(enabled=False)\ndef g(): ...\n",
        "from torch.amp import autocast, custom_bwd, custom_fwd\nimport torch\n"
        "class F(torch.autograd.Function):\n    @staticmethod\n"
        '    @custom_fwd(device_type="cuda")\n    def forward(ctx, x):\n        return x\n'
        '    @staticmethod\n    @custom_bwd(device_type="cuda")\n    def backward(ctx, g):\n        return g\n'
        '@custom_fwd(device_type="cuda", cast_inputs=torch.float32)\ndef f(ctx): ...\n'
        '@autocast("cuda", enabled=False)\ndef g(): ...\n',
    ),
    "functools.partial": (
        "import functools, torch\nctx = functools.partial(torch.cuda.amp.autocast, enabled=on)\n",
        'import functools, torch\nctx = functools.partial(torch.amp.autocast, "cuda", enabled=on)\n',
    ),
    "bound to a name": (
        "import torch\nfrom contextlib import suppress\namp_autocast = suppress\nif on:\n"
        "    amp_autocast = torch.cuda.amp.autocast\nwith amp_autocast():\n    pass\n",
        "import functools\nimport torch\nfrom contextlib import suppress\namp_autocast = suppress\nif on:\n"
        '    amp_autocast = functools.partial(torch.amp.autocast, "cuda")\nwith amp_autocast():\n    pass\n',
    ),
    "bound to a name and called by position": (
        "import torch\nac = torch.cuda.amp.autocast\nwith ac(False):\n    pass\n",
        'import functools\nimport torch\nac = functools.partial(torch.amp.autocast, "cuda")\nwith ac(enabled=False):\n'
        "    pass\n",
    ),
    "stand-in for old torch": (
        "import torch\ntry:\n    autocast = torch.cuda.amp.autocast\nexcept AttributeError:\n    class autocast:\n"
        "        def __init__(self, enabled): ...\nautocast(enabled=True)\n",
        "import functools\nimport torch\ntry:\n"
        '    autocast = functools.partial(torch.amp.autocast, "cuda")\nexcept AttributeError:\n    class autocast:\n'
        "        def __init__(self, enabled): ...\nautocast(enabled=True)\n",
    ),
    "import with a stand-in": (
        "try:\n    from torch.cuda.amp import autocast\nexcept ImportError:\n    autocast = None\n"
        "def f():\n    with autocast(enabled=True):\n        pass\n",
        "try:\n    from torch.amp import autocast\nexcept ImportError:\n    autocast = None\n"
        'def f():\n    with autocast("cuda", enabled=True):\n        pass\n',
    ),
    "import with stand-ins in one line": (
        "try:\n    from torch.cuda.amp import autocast, GradScaler\nexcept ImportError:\n"
        "    autocast, GradScaler = None, None\ns = GradScaler() if GradScaler else None\n"
        "if autocast and not s:\n    autocast(False)\n",
        "try:\n    from torch.amp import autocast, GradScaler\nexcept ImportError:\n"
        '    autocast, GradScaler = None, None\ns = GradScaler("cuda") if GradScaler else None\n'
        'if autocast and not s:\n    autocast("cuda", enabled=False)\n',
    ),
    "module that may be None": (
        "try:\n    from torch.cuda import amp\nexcept ImportError:\n    amp = None\nassert amp\n"
        "while amp and on:\n    amp.autocast(False)\n",
        "try:\n    from torch import amp\nexcept ImportError:\n    amp = None\nassert amp\n"
        'while amp and on:\n    amp.autocast("cuda", enabled=False)\n',
    ),
    "beside another device": (
        "import torch\nif torch.cuda.is_available():\n    c = torch.cuda.amp.autocast()\nelse:\n"
        "    c = torch.autocast('cpu')\n",
        "import torch\nif torch.cuda.is_available():\n    c = torch.amp.autocast('cuda')\nelse:\n"
        "    c = torch.autocast('cpu')\n",
    ),
    "attribute of a class": (
        "from functools import partial\nimport torch\nclass C:\n    ctx = torch.cuda.amp.autocast\n",
        "from functools import partial\nimport torch\nclass C:\n"
        '    ctx = staticmethod(partial(torch.amp.autocast, "cuda"))\n',
    ),
    "attribute of a class of the same name": (
        "import functools\nfrom torch.cuda.amp import autocast\nclass C:\n    autocast = autocast\n",
        "import functools\nfrom torch.amp import autocast\nclass C:\n"
        '    autocast = staticmethod(functools.partial(autocast, "cuda"))\n',
    ),
    "another library's partial": (
        "import funcy\nimport torch\nac = funcy.partial(torch.cuda.amp.autocast, dtype=low)\n",
        'import funcy\nimport torch\nac = funcy.partial(torch.amp.autocast, "cuda", dtype=low)\n',
    ),
    "import below the header": (
        '#!/usr/bin/env python\n# Licence.\n\n"""Doc."""\nfrom __future__ import annotations\n\nimport os\n\n'
        "import torch\n\nac = torch.cuda.amp.autocast\n",
        '#!/usr/bin/env python\n# Licence.\n\n"""Doc."""\nfrom __future__ import annotations\n\nimport os\n'
        'import functools\n\nimport torch\n\nac = functools.partial(torch.amp.autocast, "cuda")\n',
    ),
    "import above all others": (
        "# Licence.\n\n# torch first\nimport torch\n\nac = torch.cuda.amp.autocast\n",
        "# Licence.\n\n# torch first\nimport functools\nimport torch\n\n"
        'ac = functools.partial(torch.amp.autocast, "cuda")\n',
    ),
    "import beside a function": (
        "import torch\nif V(torch.__version__) >= V('1.6'):\n    from torch.cuda.amp import autocast\nelse:\n"
        "    def autocast(enabled=True): ...\nwith autocast(False):\n    pass\n",
        "import functools\nimport torch\nif V(torch.__version__) >= V('1.6'):\n    from torch.amp import autocast\n"
        "    autocast = functools.partial(autocast, 'cuda')\nelse:\n    def autocast(enabled=True): ...\n"
        "with autocast(enabled=False):\n    pass\n",
    ),
    "import beside a function, more unpacked": (
        "if new:\n    from torch.cuda.amp import autocast\nelse:\n    def autocast(enabled=True): ...\n"
        "autocast(on, **more)\n",
        "import functools\nif new:\n    from torch.amp import autocast\n"
        '    autocast = functools.partial(autocast, "cuda")\nelse:\n    def autocast(enabled=True): ...\n'
        "autocast(enabled=on, **more)\n",
    ),
    "import behind a colon": (
        "try: from torch.cuda.amp import autocast; on = True\nexcept ImportError: on = False\n"
        "if on: from torch.cuda.amp import autocast_mode\nautocast(on); autocast_mode.autocast(on)\n",
        "try: from torch.amp import autocast; on = True\nexcept ImportError: on = False\nif on: import torch\n"
        'autocast("cuda", enabled=on); torch.amp.autocast("cuda", enabled=on)\n',
    ),
    "import behind a colon, by device": (
        "import functools\nif cuda: from torch.cuda.amp import autocast\nelse: from torch.cpu.amp import autocast\n"
        "with autocast(enabled=on):\n    pass\n",
        'import functools\nif cuda: from torch.amp import autocast; autocast = functools.partial(autocast, "cuda")\n'
        'else: from torch.amp import autocast; autocast = functools.partial(autocast, "cpu")\n'
        "with autocast(enabled=on):\n    pass\n",
    ),
    "import by device": (
        "import functools\nif cuda:\n    from torch.cuda.amp import GradScaler, autocast as ac\nelse:\n"
        "    from torch.cpu.amp import GradScaler, autocast as ac\nwith ac(dtype=low):\n    GradScaler(1.0)\n",
        "import functools\nif cuda:\n    from torch.amp import GradScaler, autocast as ac\n"
        '    GradScaler = functools.partial(GradScaler, "cuda")\n    ac = functools.partial(ac, "cuda")\nelse:\n'
        '    from torch.amp import GradScaler, autocast as ac\n    GradScaler = functools.partial(GradScaler, "cpu")\n'
        '    ac = functools.partial(ac, "cpu")\nwith ac(dtype=low):\n    GradScaler(1.0)\n',
    ),
    "decorator beside a function": (
        "if gpu:\n    from torch.cuda.amp import custom_fwd\nelse:\n    def custom_fwd(f): return f\n"
        "@custom_fwd\ndef forward(ctx, x): ...\n",
        "import functools\nif gpu:\n    from torch.amp import custom_fwd\n"
        '    custom_fwd = functools.partial(custom_fwd, device_type="cuda")\nelse:\n'
        "    def custom_fwd(f): return f\n@custom_fwd\ndef forward(ctx, x): ...\n",
    ),
    "wrapped again": (
        "from torch.cuda.amp import autocast\nautocast = timed(autocast)\nimport functools\n"
        "with autocast(enabled=on):\n    pass\n",
        'from torch.amp import autocast\nimport functools\nautocast = functools.partial(autocast, "cuda")\n'
        "autocast = timed(autocast)\nimport functools\nwith autocast(enabled=on):\n    pass\n",
    ),
    "bound to a name that is imported, too": (
        "import functools, torch\nfrom torch.cpu.amp import GradScaler\nGradScaler = torch.cpu.amp.GradScaler\nGradScaler(2.0)\n",
        'import functools, torch\nfrom torch.amp import GradScaler\nGradScaler = functools.partial(GradScaler, "cpu")\n'
        'GradScaler = functools.partial(torch.amp.GradScaler, "cpu")\nGradScaler(2.0)\n',
    ),
    "an enumeration": (
        "import torch\nStage = torch.cuda.amp.grad_scaler.OptState\nStage.READY, [torch.cuda.amp.grad_scaler.OptState]\n",
        "import torch\nStage = torch.amp.grad_scaler.OptState\nStage.READY, [torch.amp.grad_scaler.OptState]\n",
    ),
    "module bound to a name": (
        "import torch\namp = torch.cuda.amp\nwith amp.autocast(True):\n    pass\n",
        'import torch\namp = torch.amp\nwith amp.autocast("cuda", enabled=True):\n    pass\n',
    ),
    "import inside a function": (
        "def main():\n    from torch.cuda.amp import GradScaler\n    return GradScaler()\n",
        'def main():\n    from torch.amp import GradScaler\n    return GradScaler("cuda")\n',
    ),
    "getattr and hasattr": (
        "import torch\nif hasattr(torch.cuda.amp, 'autocast'):\n    getattr(torch.cuda.amp, 'autocast')(enabled=True)\n"
        "ok = getattr(torch.cuda.amp, 'autocast') is not None\n",
        "import torch\nif hasattr(torch.amp, 'autocast'):\n    torch.amp.autocast('cuda', enabled=True)\n"
        "ok = torch.amp.autocast is not None\n",
    ),
    "types": (
        "import torch\nfrom typing import Optional\ndef f(s: Optional[torch.cuda.amp.GradScaler]) -> "
        '"torch.cuda.amp.GradScaler":\n    assert isinstance(s, (torch.cuda.amp.GradScaler, int))\n',
        "import torch\nfrom typing import Optional\ndef f(s: Optional[torch.amp.GradScaler]) -> "
        '"torch.amp.GradScaler":\n    assert isinstance(s, (torch.amp.GradScaler, int))\n',
    ),
    "class patterns": (
        "from torch.cuda.amp import GradScaler\nmatch s:\n    case GradScaler() | int():\n        pass\n",
        "from torch.amp import GradScaler\nmatch s:\n    case GradScaler() | int():\n        pass\n",
    ),
    "names that patterns bind": (
        "from torch.cuda.amp import autocast, GradScaler as G\ndef f(s):\n    match s:\n"
        "        case [autocast]: return autocast(1)\n        case [_, *autocast]: return autocast\n"
        "        case {'a': _, **autocast}: return autocast\n        case int() as autocast: return autocast\n"
        "def g(s):\n    match s:\n        case G(autocast=on): return autocast(on)\n",
        "from torch.amp import autocast, GradScaler as G\ndef f(s):\n    match s:\n"
        "        case [autocast]: return autocast(1)\n        case [_, *autocast]: return autocast\n"
        "        case {'a': _, **autocast}: return autocast\n        case int() as autocast: return autocast\n"
        "def g(s):\n    match s:\n        case G(autocast=on): return autocast('cuda', enabled=on)\n",
    ),
    "subclass with a constructor": (
        "import torch\nclass S(torch.cuda.amp.GradScaler):\n    def __init__(self, n):\n"
        "        super().__init__(growth_interval=n)\n",
        "import torch\nclass S(torch.amp.GradScaler):\n    def __init__(self, n):\n"
        '        super().__init__("cuda", growth_interval=n)\n',
    ),
    "subclass with a long constructor": (
        "import torch\nclass S(torch.cuda.amp.GradScaler):\n    def __init__(self, n):\n        self.n = n\n"
        "        self.m = n\n        self.k = n\n        super().__init__(n)\n",
        "import torch\nclass S(torch.amp.GradScaler):\n    def __init__(self, n):\n        self.n = n\n"
        '        self.m = n\n        self.k = n\n        super().__init__("cuda", n)\n',
    ),
    "star import": (
        "from torch.cuda.amp import *\nwith autocast():\n    GradScaler()\n",
        'from torch.amp import GradScaler, autocast\nwith autocast("cuda"):\n    GradScaler("cuda")\n',
    ),
    "private cast": (
        "from torch.cuda.amp import autocast_mode\nautocast_mode._cast(x, dtype)\n",
        'import torch\ntorch.amp.autocast_mode._cast(x, "cuda", dtype)\n',
    ),
}

UNTOUCHED = {
    "amp of an unknown module": 'def make(module):\n    return module.amp.GradScaler("cuda")\n',
    "amp of a variable from elsewhere": "from x import torch as t\nmod = t.cuda\nmod.amp.autocast()\n",
    "another package's amp": (
        "import paddle as torch\nfrom torch_npu import npu\nfrom jittor import cuda\n"
        "torch.cuda.amp.autocast(), npu.amp.autocast(), cuda.amp.GradScaler(), config.cuda.amp\n"
    ),
    "successor first, exported": (
        "try:\n    from torch.amp import autocast\nexcept ImportError:\n    from torch.cuda.amp import autocast\n"
        "__all__ = ['autocast']\n"
    ),
    "successor first": (
        "try:\n    from torch.amp import GradScaler\nexcept ImportError:\n    from torch.cuda.amp import GradScaler\n"
        "def f(scaler: GradScaler):\n    return isinstance(scaler, GradScaler) or GradScaler('cuda')\n"
    ),
    "prose in code in a string": "text = 'print(1, \\'torch.cuda.amp\\')  # torch.cuda.amp'\n",
    "comment in a doctest": ('def f():\n    """Do.\n\n    >>> f()  # as torch.cuda.amp.autocast\n    """\n'),
    "prose in a string": "raise RuntimeError('`torch.cuda.amp.GradScaler` needs CUDA')\n",
    "torch.amp already": "from torch import amp\nwith amp.autocast(device_type='cuda'):\n    amp.GradScaler('cuda')\n",
    "a parameter of the same name": (
        "def f(autocast, amp):\n    with autocast():\n        amp.autocast(True)\n# torch.cuda.amp\n"
    ),
    "prose": '"""Uses torch.cuda.amp.autocast()."""\n# torch.cuda.amp.autocast()\n',
    "another module's autocast": "from mylib.cuda.amp import autocast\nautocast()\n",
}

HUMAN = {
    "a device, and more by position": (
        "import torch\ntorch.cuda.amp.autocast('cuda', True, torch.float16)\n",
        "the other arguments are ambiguous",
    ),
    "a name that a pattern may bind": (
        "from torch.cuda.amp import autocast\nmatch s:\n    case [autocast]: pass\nautocast(False)\n",
        "`autocast` may also mean something else",
    ),
    "star import between two of the same name": (
        "from torch.cpu.amp import autocast\nfrom torch.cuda.amp import *\nfrom torch.cpu.amp import autocast\n"
        "autocast(False)\n",
        "`autocast` is bound to torch.cpu.amp.autocast and to torch.cuda.amp.autocast",
    ),
    "star import below a name that it has too": (
        "from torch.cuda.amp import autocast\nfrom torch.cuda.amp import *\nautocast(*args)\nautocast()\n",
        "twice, by name and by a star import",
    ),
    "a name of two meanings, by another name": (
        "import torch\na = torch.cpu.amp.autocast\nif gpu:\n    a = torch.cuda.amp.autocast\nb = a\nb(False)\n",
        "`a` is used as a class or passed on",
    ),
    "version switch": (
        "import torch\nif hasattr(torch.amp, 'custom_fwd'):\n    from torch.amp import custom_fwd\nelse:\n"
        "    from torch.cuda.amp import custom_fwd\n@custom_fwd\ndef f(ctx): ...\n",
        "another branch binds `custom_fwd` to the successor",
    ),
    "version switch in an expression": (
        "import torch\ns = torch.amp.GradScaler('cuda') if _TORCH_2_4 else torch.cuda.amp.GradScaler()\n",
        "another branch uses the successor",
    ),
    "version switch around a call": (
        "import torch\nfrom torch.cuda.amp import autocast\nif version.parse(torch.__version__) < version.parse('2.4'):\n"
        "    c = autocast(on)\nelse:\n    c = torch.autocast('cuda', enabled=on)\n",
        "another branch uses the successor",
    ),
    "the successor first": (
        "import torch\ntry:\n    s = torch.amp.GradScaler('cuda')\nexcept AttributeError:\n"
        "    s = torch.cuda.amp.GradScaler()\n",
        "another branch uses the successor",
    ),
    "class beside something else": (
        "if gpu:\n    from torch.cuda.amp import GradScaler\nelse:\n    from torch.npu.amp import GradScaler\n"
        "isinstance(scaler, GradScaler)\n",
        "is used as a class",
    ),
    "an alias of two devices as a base": (
        "import torch\nif gpu:\n    G = torch.cuda.amp.GradScaler\nelse:\n    G = torch.cpu.amp.GradScaler\n"
        "class S(G): ...\n",
        "is used as a class",
    ),
    "by position beside something else": (
        "if gpu:\n    from torch.cuda.amp import autocast\nelse:\n    from contextlib import nullcontext as autocast\n"
        "autocast(False)\n",
        "the successor orders differently",
    ),
    "by position beside other arguments": (
        "if gpu:\n    from torch.cuda.amp import autocast\nelse:\n    def autocast(enabled=True, kind=None): ...\n"
        "autocast(False, low)\n",
        "the successor orders differently",
    ),
    "apex or torch": (
        "try:\n    from apex import amp\nexcept ImportError:\n    from torch.cuda import amp\namp.autocast()\n",
        "is bound to apex.amp and to torch.cuda.amp",
    ),
    "argument splat": ("import torch\ntorch.cuda.amp.autocast(*args)\n", "pass them by keyword"),
    "bare decorator": (
        "from torch.cuda.amp import autocast\n@autocast\ndef f(): ...\n",
        "without parentheses passes the function as `enabled`",
    ),
    "handed to a function": (
        "import torch\nregister(torch.cuda.amp.GradScaler)\n",
        "is used as a value here; pass functools.partial(..., 'cuda')",
    ),
    "decorator handed to a function": (
        "import torch\nregister(torch.cuda.amp.custom_fwd)\n",
        "pass functools.partial(..., device_type='cuda')",
    ),
    "private cast as a value": (
        "import torch\nc = torch.cuda.amp.autocast_mode._cast\ndef f(): return torch.cuda.amp.autocast_mode._cast\nc(x, low)\n",
        "`_cast` takes (value, device_type, dtype) now",
    ),
    "replaced by a patch of its path": (
        "import torch\nwith mock.patch('torch.cuda.amp.autocast', mine):\n    torch.cuda.amp.autocast(False)\n",
        "this file replaces `torch.cuda.amp.autocast`",
    ),
    "replaced by a patch of the module": (
        "import torch\nwith mock.patch.object(torch.cuda.amp, 'autocast'):\n    torch.cuda.amp.autocast(False)\n",
        "this file replaces `torch.cuda.amp.autocast`",
    ),
    "replaced by a patch of several": (
        "import torch\nwith patch.multiple(torch.cuda.amp, GradScaler=X):\n    torch.cuda.amp.GradScaler()\n",
        "this file replaces `torch.cuda.amp.GradScaler`",
    ),
    "replaced by setattr": (
        "import torch\nsetattr(torch.cuda.amp, 'autocast', mine)\nwith torch.cuda.amp.autocast(False):\n    pass\n",
        "this file replaces `torch.cuda.amp.autocast`",
    ),
    "torch hidden by a parameter": (
        "from torch.cuda.amp import autocast_mode\ndef f(torch):\n    return autocast_mode.autocast(False)\n",
        "`torch` is a local variable here",
    ),
    "functools hidden by a variable": (
        "import torch\ndef f():\n    functools = 1\n    g = torch.cuda.amp.autocast\n    return g(False)\n",
        "`functools` is a local variable here",
    ),
    "one of two, called by position": (
        "import torch\nac = torch.cuda.amp.autocast if on else nullcontext\nwith ac(False):\n    pass\n",
        "its value is called with positional arguments",
    ),
    "one of three, called by position at once": (
        "import torch\nwith (a if x else (torch.cuda.amp.autocast if on else nullcontext))(*args):\n    pass\n",
        "its value is called with positional arguments",
    ),
    "functools imported below": (
        "import torch\ndef f():\n    g = torch.cuda.amp.autocast\n    import functools\n    return g(False)\n",
        "`functools` is a local variable here",
    ),
    "partial hidden by a parameter": (
        "from functools import partial\nimport torch\ndef f(partial):\n    g = torch.cuda.amp.autocast\n    return g(False)\n",
        "`partial` is a local variable here",
    ),
    "inside f-strings with both marks": (
        "import torch\nprint(f'{f\"{torch.cuda.amp.autocast()}\"}')\n",
        "use both quotation marks",
    ),
    "constructor called by name": (
        "import torch\nclass S(torch.cuda.amp.GradScaler):\n    def __init__(self, x):\n"
        "        torch.cuda.amp.GradScaler.__init__(self, x)\n",
        "class S does not call super().__init__ once",
    ),
    "type comment": (
        "import torch\ndef f(a,  # type: Optional[torch.cuda.amp.GradScaler]\n      b): ...\n",
        "this type comment has the deprecated name",
    ),
    "replaced among others": (
        "import torch\ntorch.cuda.amp.autocast, x = mine, 1\nwith torch.cuda.amp.autocast(False):\n    pass\n",
        "this file replaces `torch.cuda.amp.autocast`",
    ),
    "partial by keyword": (
        "from functools import partial\nimport torch\npartial(func=torch.cuda.amp.autocast)\n",
        "is used as a value here",
    ),
    "unused star import": (
        "from torch.cuda.amp import *\nfrom torch.amp import autocast\nautocast('cpu')\n",
        "this file uses none of its names",
    ),
    "computed attribute": ("import torch\ngetattr(torch.cuda.amp, name)()\n", "used as an object"),
    "availability": (
        "import torch\ntorch.cuda.amp.common.amp_definitely_not_available()\n",
        "write `not torch.cuda.is_available()`",
    ),
    "torch from another file": (
        "from ..compat import torch\nwith torch.cuda.amp.autocast(False):\n    pass\n",
        "`torch` is not imported from torch here",
    ),
    "torch that a test may skip": (
        "import pytest\ntorch = pytest.importorskip('torch')\ns = torch.cuda.amp.grad_scaler.GradScaler()\n",
        "`torch` is not imported from torch here",
    ),
    "a substitute for torch": (
        "if has_torch:\n    import torch\nelse:\n    torch = Stub()\n\n@torch.cpu.amp.autocast(False)\ndef f(): ...\n",
        "`torch` is not imported from torch here",
    ),
    "a variable that is part of torch in one branch": (
        "import torch\nif x:\n    mod = torch.cuda\nelse:\n    mod = torch.cpu\nwith mod.amp.autocast(False):\n    pass\n",
        "it may be that of `torch.cuda`",
    ),
    "a choice of two parts of torch": (
        "import torch\n(torch.cpu if x else torch.xpu).amp.autocast()\n",
        "it may be that of `torch.cpu`",
    ),
    "the part of torch of any device": (
        "import torch\nscaler = getattr(torch, device.type).amp.GradScaler()\n",
        "it may be that of `torch.cuda`",
    ),
    "the part of torch of any device in a variable": (
        "import torch\nmod = getattr(torch, device.type, None)\nscaler = mod.amp.GradScaler()\n",
        "it may be that of `torch.cuda`",
    ),
    "a submodule in a quoted annotation": (
        "from torch.cuda.amp import grad_scaler\ndef f(scaler: 'grad_scaler.GradScaler'): ...\n",
        "an annotation in a string uses it",
    ),
    "import of a private name": (
        "from torch.cuda.amp.grad_scaler import _refresh_per_optimizer_state\n",
        "in torch.amp.grad_scaler since torch 2.3",
    ),
    "import without a successor": (
        "from torch.cuda.amp.common import amp_definitely_not_available as no_amp\n",
        "write `not torch.cuda.is_available()`",
    ),
    "name in a string": ("import torch\nS = eval('torch.cuda.amp.GradScaler()')\n", "string contains"),
    "program in a string": (
        'exec("""\n    from torch.cuda.amp import autocast\n    autocast()\n""")\n',
        "string contains",
    ),
    "import in a string": ("exec('from torch.cuda import nvtx, amp\\namp.autocast()')\n", "string contains"),
    "doctest": (
        'def f():\n    """Do.\n\n    >>> with torch.cuda.amp.autocast(True):\n    ...     f()\n    """\n',
        "string contains",
    ),
    "inherited constructor": (
        "import torch\nclass S(torch.cuda.amp.GradScaler): ...\n",
        "inherits the constructor",
    ),
    "imported into a class": (
        "class C:\n    from torch.cuda.amp import autocast\n    def f(self): self.autocast(False)\n",
        "in a class",
    ),
    "in __all__": ("from torch.cuda.amp import autocast\n__all__ = ['autocast']\n", "__all__"),
    "replaced from outside": (
        "import torch\nold = torch.cuda.amp.autocast\ntorch.cuda.amp.autocast = mine\n"
        "with torch.cuda.amp.autocast(False), old(False):\n    pass\ntorch.cuda.amp.autocast = old\n",
        "this file replaces `torch.cuda.amp.autocast`",
    ),
    "module that may be missing": (
        "import torch\namp = getattr(torch.cuda, 'amp', None)\nif amp is not None:\n    amp.autocast(False)\n",
        "getattr with a default",
    ),
    "the first that exists": (
        "import torch\nf = getattr(torch, 'autocast', None) or getattr(torch.cuda.amp, 'autocast', None)\n",
        "getattr with a default",
    ),
}


@pytest.mark.parametrize("case", REWRITES, ids=str)
def test_rewrites_to_torch_amp(case: str) -> None:
    """Each way of writing a deprecated call becomes the call that torch's warning asks for."""
    before, after = REWRITES[case]
    assert migrate_source(before, TORCH).text == after


@pytest.mark.parametrize("target", [TORCH, CORE], ids=lambda t: t.module)
@pytest.mark.parametrize("case", REWRITES, ids=str)
def test_second_run_changes_nothing(case: str, target) -> None:
    """A migrated file is left alone, for both targets, and still parses."""
    once = migrate_source(REWRITES[case][0], target).text
    compile(once, "migrated", "exec")
    assert migrate_source(once, target).text == once


@pytest.mark.parametrize("case", UNTOUCHED, ids=str)
def test_leaves_other_code_alone(case: str) -> None:
    """A name that only looks like the deprecated one is neither rewritten nor reported."""
    result = migrate_source(UNTOUCHED[case], TORCH)
    assert (result.text, result.findings) == (UNTOUCHED[case], [])


@pytest.mark.parametrize("case", HUMAN, ids=str)
def test_reports_what_needs_a_human(case: str) -> None:
    """What is not certain stays as it was, and is reported with its line and the reason."""
    source, reason = HUMAN[case]
    result = migrate_source(source, TORCH)
    manual = [f for f in result.findings if f.level == "manual"]
    assert result.text == source
    assert any(reason in f.message for f in manual), manual
    assert all(1 <= f.line <= source.count("\n") for f in manual)


def test_one_doubtful_use_keeps_the_import_for_itself() -> None:
    """Where one use cannot follow, the import stays for it and the other uses are spelled out."""
    source = "from torch.cuda.amp import autocast\nregister(autocast)\nwith autocast():\n    pass\n"
    expected = (
        "from torch.cuda.amp import autocast\nimport torch\nregister(autocast)\n"
        'with torch.amp.autocast("cuda"):\n    pass\n'
    )
    assert migrate_source(source, TORCH).text == expected


@pytest.mark.parametrize("test", ["amp is not None", "amp"])
@pytest.mark.parametrize(("path", "name"), [("torch.cuda", "amp"), ("torch.cuda.amp", "GradScaler")])
def test_a_test_of_an_import_that_stays_asks_for_its_name(test: str, path: str, name: str) -> None:
    """The program asks whether it has imported the name yet; the successor always exists."""
    test = test.replace("amp", name)
    made = "amp.GradScaler()" if name == "amp" else "GradScaler()"
    source = (
        f"{name} = None\ndef setup():\n    global {name}\n    from {path} import {name}\n"
        f"def use():\n    if {test}:\n        {made}\n    register({name})\n"
    )
    result = migrate_source(source, TORCH)
    assert result.text == "import torch\n" + source.replace(made, 'torch.amp.GradScaler("cuda")')
    assert [(f.line, f.level) for f in result.findings] == [(7, "changed"), (8, "manual")]


def test_names_that_other_files_import_stay() -> None:
    """A module that hands `autocast` on keeps the deprecated one: its importers call it without a device."""
    source = "from torch.cuda.amp import autocast\n"
    assert migrate_source(source, TORCH).text != source
    assert migrate_source(source, TORCH, exported={"autocast"}).text == source


@pytest.mark.parametrize(
    "statement",
    [
        "__all__: list[str] = ['autocast']",
        "__all__ = [] + ['autocast']",
        "__all__ = 'f autocast'.split()",
        "__all__ = []\n__all__ += ['autocast']",
        "__all__ = []\n__all__.extend(['autocast'])",
        "if on:\n    __all__ = ('autocast',)",
    ],
)
@pytest.mark.parametrize("names", ["autocast", "*"])
def test_names_in_any_form_of_dunder_all_stay(statement: str, names: str) -> None:
    """Who imports the name goes on to call it without a device."""
    source = f"from torch.cuda.amp import {names}\n{statement}\n"
    result = migrate_source(source, TORCH)
    assert (result.text, [f.level for f in result.findings]) == (source, ["manual"])


@pytest.mark.parametrize("export", ["__all__ = ['ac']\n", ""])
def test_an_alias_that_other_files_use_is_marked_for_review(export: str) -> None:
    """Their positional arguments get another meaning, and the report calls the file done."""
    source = f"import torch\nac = torch.cuda.amp.autocast\n{export}"
    result = migrate_source(source, TORCH, exported=() if export else {"ac"})
    assert [f.level for f in result.findings] == ["review"]


def test_an_alias_in_a_class_is_marked_for_review() -> None:
    """``self.ac(False)`` is far from the alias, and turns the region on with a wrong dtype."""
    source = (
        "import torch\nclass C:\n    ac = torch.cuda.amp.autocast\n    def f(self): return self.ac(False)\n"
    )
    assert [f.level for f in migrate_source(source, TORCH).findings] == ["review"]


@pytest.mark.parametrize(
    ("program", "level"),
    [
        ("p = {}(dtype=low)\ndef f():\n    x = p\n    return x(False)\n", "review"),
        ("p = {}(dtype=low)\ndef f():\n    x = 1\n    x = 2\n    return p(False)\n", "review"),
        ("p = {}(dtype=low)\ndef f():\n    x = 1\n    x = 2\n    return p(enabled=False)\n", "changed"),
        ("p = {}(False)\nvalidate(p)\n", "changed"),
        ("p = {}(enabled=False)\nvalidate(p)\n", "changed"),
        ("p = q = {}()\np()\n", "review"),
        ("class C:\n    p = {}()\n", "review"),
        ("shared = {}()\n", "review"),
        ("{}()(False)\n", "review"),
        ("{}()(enabled=False)\n", "changed"),
    ],
)
def test_a_partial_that_may_get_positional_arguments_is_marked_for_review(program: str, level: str) -> None:
    """``p(False)`` turned the region off, and gives it a wrong dtype instead."""
    made = program.replace("{}()", "functools.partial(torch.cuda.amp.autocast)")
    made = made.replace("{}(", "functools.partial(torch.cuda.amp.autocast, ")
    result = migrate_source(f"import functools, torch\n{made}", TORCH, exported={"shared"})
    assert [f.level for f in result.findings] == [level]


@pytest.mark.parametrize("above", ["", "class C:\n    "])
def test_a_module_that_other_code_reaches_by_its_alias_stays(above: str) -> None:
    """``utils.amp.autocast(False)`` and ``self.amp.autocast(False)`` get another meaning."""
    source = f"import torch\n{above}amp = torch.cuda.amp\n"
    result = migrate_source(source, TORCH, exported={"amp"} if not above else ())
    assert (result.text, [f.level for f in result.findings]) == (source, ["manual"])


@pytest.mark.parametrize(("bases", "level"), [("Mixin, {}", "review"), ("{}, Mixin", "changed")])
def test_a_base_before_the_deprecated_one_is_marked_for_review(bases: str, level: str) -> None:
    """``super().__init__`` calls its constructor, which gets a device that it does not know."""
    base = bases.format("torch.cuda.amp.GradScaler")
    source = f"import torch\nclass S({base}):\n    def __init__(self, x): super().__init__(x)\n"
    assert [f.level for f in migrate_source(source, TORCH).findings] == [level]


LAZY = {
    "in a function": (
        "def f():\n    import torch\n    return torch.cuda.amp.autocast()\n",
        'def f():\n    import torch\n    import amp_core\n    return amp_core.autocast("cuda")\n',
    ),
    "if it is installed": (
        "try:\n    import torch\nexcept ImportError:\n    torch = None\ndef f():\n    torch.cuda.amp.autocast()\n",
        "try:\n    import torch\n    import amp_core\nexcept ImportError:\n    torch = None\n"
        'def f():\n    amp_core.autocast("cuda")\n',
    ),
    "by an alias": (
        "def f():\n    import torch\n    old = torch.cuda.amp\n    return lambda: old.autocast()\n",
        "def f():\n    import torch\n    import amp_core\n    old = amp_core\n"
        '    return lambda: old.autocast("cuda")\n',
    ),
    "once above": (
        "def f():\n    import torch, amp_core\n    from torch.cuda.amp import grad_scaler\n"
        "    return grad_scaler.GradScaler(), torch\n",
        'def f():\n    import torch, amp_core\n    return amp_core.GradScaler("cuda"), torch\n',
    ),
    "below the first use": (
        "try:\n    import torch.cuda as c\nexcept ImportError:\n    c = None\nc.amp.GradScaler()\nimport torch.nn\n",
        "try:\n    import torch.cuda as c\n    import amp_core\nexcept ImportError:\n    c = None\n"
        'amp_core.GradScaler("cuda")\nimport torch.nn\n',
    ),
    "after the environment is set": (
        "import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\nimport sys\nf()\ntorch.cuda.amp.autocast()\n",
        "import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\nimport sys\nimport amp_core\nf()\n"
        "amp_core.autocast('cuda')\n",
    ),
}


@pytest.mark.parametrize("case", LAZY, ids=str)
def test_amp_core_is_imported_where_torch_is(case: str) -> None:
    """A module that imports torch late, or does without it, would import it at once, or fail."""
    before, after = LAZY[case]
    assert migrate_source(before, CORE).text == after


def test_amp_core_is_imported_once() -> None:
    """The import is added once, behind the file's imports, whatever the number of uses."""
    source = (
        '"""Doc."""\nfrom __future__ import annotations\nimport torch\n\nwith torch.cuda.amp.autocast():\n'
        "    s = torch.cuda.amp.GradScaler()\nwith torch.cpu.amp.autocast():\n    pass\n"
    )
    text = migrate_source(source, CORE).text
    assert text.count("import amp_core") == 1
    assert "import torch\nimport amp_core\n" in text
    assert 'with amp_core.autocast("cpu"):' in text


@pytest.mark.parametrize(
    "outer",
    [
        "with torch.autocast('cuda', dtype=torch.bfloat16):",
        "with torch.autocast('cuda', torch.bfloat16):",
        "with torch.cuda.amp.autocast(True, torch.bfloat16):",
        "@torch.autocast('cuda', dtype=torch.bfloat16)\ndef train():",
    ],
)
@pytest.mark.parametrize("arguments", ["", "enabled=on, cache_enabled=False", "on"])
def test_nested_region_is_marked_for_review(outer: str, arguments: str) -> None:
    """The default dtype was float16 whatever surrounds; now it is the enclosing region's. The report says so."""
    source = f"import torch\n{outer}\n    with torch.cuda.amp.autocast({arguments}):\n        f()\n"
    review = [f for f in migrate_source(source, TORCH).findings if f.level == "review"]
    assert len(review) == 1
    assert "float16" in review[0].message


@pytest.mark.parametrize(
    ("outer", "arguments"),
    [
        ("with torch.autocast('cuda', enabled=False):", ""),
        ("def train():", ""),
        ("with torch.autocast('cuda', dtype=torch.bfloat16):", "dtype=torch.float16"),
        ("with torch.autocast('cuda', dtype=torch.bfloat16):", "on, torch.float16"),
    ],
)
def test_a_region_that_keeps_its_dtype_is_not_marked(outer: str, arguments: str) -> None:
    """Every region of a program asks for a review."""
    source = f"import torch\n{outer}\n    with torch.cuda.amp.autocast({arguments}):\n        f()\n"
    assert {f.level for f in migrate_source(source, TORCH).findings} == {"changed"}


def test_names_that_are_bound_to_attributes_of_each_other() -> None:
    """Each binding is followed through all others in every order: these twelve would take days."""
    links = "    c = d.next\n    d = c.next\n" * 6
    assert migrate_source(f"from apex import amp\ndef last(c, d):\n{links}", TORCH).findings == []


def test_line_endings_and_long_functions_are_kept() -> None:
    """Windows line endings and functions that were left out of the analysis come back byte for byte."""
    body = "".join(f"    x{i} = {i}  # kept\r\n" for i in range(20))
    source = f"import torch\r\n\r\n\r\n# above\r\n@deco\r\ndef f(a, *, b=1):\r\n{body}\r\nwith torch.cuda.amp.autocast(): f()\r\n"
    assert migrate_source(source, TORCH).text == source.replace("cuda.amp.autocast()", 'amp.autocast("cuda")')


APEX = (
    "from apex import amp\nmodel, opt = amp.initialize(model, opt, opt_level='O1')\n"
    "with amp.scale_loss(loss, opt) as scaled:\n    scaled.backward()\nclip(amp.master_params(opt))\namp.state_dict()\n"
)


def test_apex_goes_to_its_successor() -> None:
    """To amp_core, apex's five functions are served by amp_compat.apex under the names the file uses."""
    assert migrate_source(APEX, CORE).text == APEX.replace(
        "from apex import amp", "from amp_compat import apex as amp"
    )


APEX_IMPORTS = {
    "import apex.amp as xamp\nxamp.initialize(m)\n": "import amp_compat.apex as xamp\nxamp.initialize(m)\n",
    "from apex.amp import initialize\ninitialize(m)\n": "from amp_compat.apex import initialize\ninitialize(m)\n",
    "import apex\napex.amp.initialize(m)\n": "import apex\nimport amp_compat.apex\namp_compat.apex.initialize(m)\n",
}


@pytest.mark.parametrize("source", APEX_IMPORTS)
def test_apex_imports_are_followed(source: str) -> None:
    """Each way to import apex.amp leads to amp_compat.apex, once."""
    result = migrate_source(source, CORE)
    assert result.text == APEX_IMPORTS[source]
    assert {f.level for f in result.findings} == {"changed"}
    assert migrate_source(result.text, CORE).text == result.text


@pytest.mark.parametrize("source", ["from apex import amp\n", "import apex.amp as amp\n"])
def test_apex_without_a_successor_is_reported_again(source: str) -> None:
    """A second run over the migrated file calls it done, and it fails with an AttributeError."""
    source += "amp.initialize(m)\namp.register_half_function(torch, 'mm')\namp.__dict__\n"
    once = migrate_source(source, CORE)
    twice = migrate_source(once.text, CORE)
    assert is_candidate(once.text.encode())
    assert twice.text == once.text
    assert twice.findings == [f for f in once.findings if f.level == "manual"] != []
    assert migrate_source(once.text, TORCH).findings == []


def test_a_local_variable_does_not_hide_amp_core() -> None:
    """The rewritten call reads the parameter, not the module."""
    source = "import torch\ndef f(amp_core):\n    return torch.cuda.amp.autocast(False)\n"
    result = migrate_source(source, CORE)
    assert (result.text, [f.level for f in result.findings]) == (source, ["manual"])
    assert "torch.amp" in migrate_source(source, TORCH).text


def test_apex_import_among_others_is_left() -> None:
    """An import that brings other things of apex's too is left, and so are its uses: never half rewritten."""
    source = "from apex import amp, optimizers\namp.initialize(m)\n"
    result = migrate_source(source, CORE)
    assert result.text == source
    assert {f.level for f in result.findings} == {"manual"}


def test_words_that_are_no_names_are_left() -> None:
    """A keyword, or an attribute of something else, is taken for a function of apex's."""
    source = "from apex.amp import initialize\nf(initialize=1)\nmodule.initialize()\n"
    assert [f.line for f in migrate_source(source, CORE).findings] == [1]


def test_apex_gets_advice_for_torch_amp() -> None:
    """What cannot be rewritten to torch.amp is reported, each call with what to write for it, and why."""
    result = migrate_source(APEX, TORCH)
    assert result.text == APEX
    assert [f.line for f in result.findings] == [2, 3, 3, 5, 6]
    assert "GradScaler('cuda')" in result.findings[0].message
    assert "does not call opt.step()" in " ".join(f.message for f in result.findings)


OLD_TRAINING = """
import torch
from torch.cpu.amp import autocast, GradScaler
torch.manual_seed(0)
model, x = torch.nn.Linear(8, 1), torch.randn(16, 8)
opt, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler(1024., growth_interval=2)
losses, dtypes = [], []
for _ in range(5):
    opt.zero_grad()
    with autocast(True, torch.bfloat16):
        out = model(x)
        loss = out.float().pow(2).mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    losses.append(loss.item()); dtypes.append(out.dtype)
state = scaler.state_dict()
"""


def test_migrated_training_gives_the_same_numbers() -> None:
    """A training loop run before and after gives equal losses, dtypes and scaler state, without the warnings."""
    before: dict[str, object] = {}
    after: dict[str, object] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        exec(compile(OLD_TRAINING, "before", "exec"), before)
    exec(compile(migrate_source(OLD_TRAINING, TORCH).text, "after", "exec"), after)
    for name in ("losses", "dtypes", "state"):
        assert before[name] == after[name]
