"""Faults to plant in the sound plugin, and the check that each fails, with the line that says so."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """source: what is appended to the plugin. what, sentence: the check that fails. reason: a pattern of its line."""

    name: str
    source: str
    what: str
    sentence: str
    reason: str


LOADS, FALLS = "its plugins load", "it trains and the loss falls"
DIVIDES = "ranks that divide its states have the bits of ranks that do not"
SKIPS, RESUMES = "a step that is skipped changes nothing", "a resumed run has the bits of an uninterrupted one"
DERIVED = "no checkpoint has what derive writes"
SCALED = "metrics are multiples of the scale of their unit"
DTYPE = "its states have the dtype that a run asks for or it is refused"
REFERENCE = "its reference has the shapes and attributes that it declares and no side effects"
DERIVATIVE = "its backward rule is the derivative of its reference"
COSTS, DECLARES = "its costs can be planned", "what it declares of its inputs and outputs holds"
ANSWERS, LAUNCHES = "it answers what a plan asks", "its launches get every output and the stream"
READS = "a config that lacks a key is read or refused by name"
DOCUMENTS = "documents of a row do not see each other"
RECOMPUTES = "every key of recomputation gives the same bits"
ROWS, BAD, COLUMNS = (
    "a row becomes the same document every time",
    "a bad row is refused or left out",
    "it reads the columns that it names",
)
REPORTS, LOADED = "it takes a report of every kind", "what it saves is what it loads"
STATED = "a weight takes the bits that it states"

LOWER = """
def added(program, *ops):
    return dataclasses.replace(program, ops=(*program.ops, *ops))

def lowering(make):
    def lower(family, context):
        with context.builder.record("backward") as ops:
            make(family, context, context.builder)
        return dataclasses.replace(family, micro=added(family.micro, *ops))
    change("RECIPE", lower=lower)

"""

EPS = """
def lowered(p):
    ops = (o.changed(attrs={**o.attrs, "eps": 0.5}) if "eps" in o.attrs else o for o in p.ops)
    return dataclasses.replace(p, ops=tuple(ops))

"""

UPDATE = """
def updating(make):
    def update(context):
        b, s = context.builder, context.scalars
        for p in context.params:
            make(context, b, s, p, state(b, p))
    change("OPTIMIZER", update=update)

from surogate_core.api import Init

def also(kind, reference):
    # an op that has the shape of its first input
    globals()["ALSO"] = OpDef(kind=kind, reference=reference, infer=lambda ins, attrs: [
        OutSpec("out", ins[0].shape, ins[0].dtype)])
    globals()["surogate_ops"] = hook("OP", "UPDATE", "INT8", "FROM_INT8", "ALSO")

def state(b, p, **more):
    return b.state(f"v.{p.param.name}", p.param.shape, "fp32", Init(kind="zeros"), **more)

def sgd(context, b, s, p, velocity, clip_coef, grad=None, momentum=0.9, stream=1):
    work = () if p.param is p.master else (p.param,)
    b.emit("acme_sgd", clip_coef, s.lr, s.step, s.seed, p.grad if grad is None else grad, p.master, velocity,
           outs=[p.master, velocity, *work], momentum=momentum, weight_decay=0.0, stream=stream,
           work_dtype=p.param.dtype if work else None)

"""

MEASURING = """
def measuring(scale, reference="labelled_total"):
    # a metric of the model: the sum of the last hidden states of tokens with a label
    def build(b, d, batch, build=MODEL.build):
        head = build(b, d, batch)
        given = (head.x, batch.targets, scale(b, batch))
        return dataclasses.replace(head, metrics=[Metric("total", b.apply("acme_total", *given))])
    change("MODEL", build=build)
    globals()["TOTAL"] = OpDef(kind="acme_total", reference=f"sound_references:{reference}",
        infer=lambda ins, attrs: [OutSpec("total", (), "fp32")])
    globals()["surogate_ops"] = hook("OP", "UPDATE", "INT8", "FROM_INT8", "TOTAL")

"""

FAULTS = [
    # ---- the package
    Fault("it does not import", "import no_such_module", "package", LOADS, "No module named 'no_such_module'"),
    Fault("one number for all hooks", "SUROGATE_API = 0", "package", LOADS, "not a number for each hook"),
    Fault("a newer hook", "SUROGATE_API['ops'] = 7", "package", LOADS, "written for version 7 of surogate_ops"),
    Fault("a hook without a number", "del SUROGATE_API['ops']", "package", LOADS, "has no number for ops"),
    Fault("a misspelt hook", "surogate_op = surogate_ops", "package", LOADS, "unknown hook; did you mean surogate_ops"),
    Fault(
        "options that ignore misspelt keys",
        "from pydantic import BaseModel\n"
        "class Loose(BaseModel):\n    acme_loose: int = 1\n"
        "change('RECIPE', options=Loose)",
        "package",
        LOADS,
        r'options of recipe .acme. lack ConfigDict\(extra="forbid"\)',
    ),
    Fault(
        "an option without a default",
        "class Needs(NoOptions):\n    acme_needed: int\nchange('RECIPE', options=Needs)",
        "package",
        LOADS,
        "acme_needed has no default",
    ),
    Fault("a name with spaces", "change('RECIPE', name='my recipe')", "package", LOADS, "text without spaces"),
    Fault(
        "an offload strategy without functions",
        "change('OFFLOAD', on_host=None)",
        "package",
        LOADS,
        "would move nothing",
    ),
    Fault(
        "a kernel whose module is not installed",
        "change('KERNEL', module='acme_kernels._C')",
        "package",
        LOADS,
        "acme_kernels._C.*in no package that is installed",
    ),
    Fault("a kernel for a dtype that does not exist", "change('KERNEL', dtypes=('fp7', '*'))", "package", LOADS, "fp7"),
    Fault(
        "a reference that does not exist",
        "change('OP', reference='sound_references:gone')",
        "package",
        LOADS,
        "sound_references has no gone",
    ),
    Fault(
        "a kernel for an op that does not exist",
        "change('KERNEL', op='acme_gone')",
        "package",
        "nothing that it provides is left over",
        "kernels for acme_gone, which no installed plugin defines",
    ),
    Fault(
        "a name that core has",
        "change('RECIPE', name='bf16')",
        "package",
        "nothing that it provides is provided twice",
        "recipe 'bf16' is provided by acme 0 and surogate-recipe-bf16",
    ),
    Fault(
        "a plugin that imports torch",
        "import torch",
        "package",
        "its module imports nothing that is slow",
        "importing acme imports torch",
    ),
    # ---- ops
    Fault(
        "a reference that writes to its input",
        "change('OP', reference='sound_references:in_place')",
        "op acme_squared_relu",
        REFERENCE,
        "wrote to input 0",
    ),
    Fault(
        "a reference of another shape",
        "change('OP', reference='sound_references:narrow')",
        "op acme_squared_relu",
        REFERENCE,
        r"\(1, 8\).*in the shape rule",
    ),
    Fault(
        "a reference that draws numbers",
        "change('OP', reference='sound_references:random')",
        "op acme_squared_relu",
        REFERENCE,
        "a second call changes squared_relu",
    ),
    Fault(
        "an attribute that the reference does not have",
        "change('FROM_INT8', attrs={'dtype': str, 'offset': (int, 0)})",
        "op acme_from_int8",
        REFERENCE,
        "attributes .*offset.*but its reference has",
    ),
    Fault(
        "a backward rule with a wrong factor",
        "change('OP', vjp=lambda b, op, grads: (b.apply('acme_squared_relu', grads[0]),))",
        "op acme_squared_relu",
        DERIVATIVE,
        "the gradient of input 0 is off by",
    ),
    Fault(
        "a backward rule that gives nothing",
        "change('OP', vjp=lambda b, op, grads: (None,))",
        "op acme_squared_relu",
        DERIVATIVE,
        "gives no gradient of input 0",
    ),
    Fault(
        "a reference that autograd does not see through",
        "change('OP', reference='sound_references:detached')",
        "op acme_squared_relu",
        DERIVATIVE,
        "finite differences",
    ),
    Fault("negative FLOPs", "change('OP', flops=lambda op: -1)", "op acme_squared_relu", COSTS, "flops: returned -1"),
    Fault(
        "a rate that no device has", "change('OP', math=lambda op: 'fp3')", "op acme_squared_relu", COSTS, "no rate of"
    ),
    Fault(
        "a product that it does not compute",
        "from surogate_core.api import Product\nchange('FROM_INT8', product=Product(of='forward'))",
        "op acme_from_int8",
        "the product that it declares is what it computes",
        "cannot be multiplied",
    ),
    Fault(
        "an op that computes what it should move",
        "change('OP', moves=True)",
        "op acme_squared_relu",
        "it moves every element of its first input and nothing else",
        "it writes other elements",
    ),
    Fault(
        "an addition that it does not absorb",
        "from surogate_core.api import Rewrites\nchange('OP', rewrites=Rewrites(add_kind=lambda op: 'add'))",
        "op acme_squared_relu",
        "the ops that replace it have its bits",
        "add is not its sum with a base",
    ),
    Fault(
        "a recomputation of something else",
        "from surogate_core.api import Rewrites\n"
        "again = lambda b, op, kept: (b.apply('add', op.ins[0], op.ins[0]),)\n"
        "change('OP', rewrites=Rewrites(rematerialize=again))",
        "op acme_squared_relu",
        "its recomputation has its bits",
        "rematerialize computes other bits",
    ),
    Fault(
        "an output in the place of a smaller input",
        "change('INT8', may_overwrite=lambda op: {0: 0})",
        "op acme_int8",
        DECLARES,
        "may overwrite input 0, but has another size",
    ),
    Fault(
        "an element that depends on others",
        "change('FROM_INT8', elementwise=lambda op: True)",
        "op acme_from_int8",
        DECLARES,
        "of a part of its first input it makes other bits",
    ),
    # ---- kernels
    Fault(
        "supports returns a bool", "change('KERNEL', supports=lambda op, target: True)", "kernel", ANSWERS, "expected a"
    ),
    Fault(
        "an attribute that the op lacks",
        "change('KERNEL', attrs=('scale',))",
        "kernel",
        ANSWERS,
        "scale, which .*not have",
    ),
    Fault(
        "negative workspace",
        "change('KERNEL', workspace=lambda op, target: -8)",
        "kernel",
        ANSWERS,
        "workspace: returned -8",
    ),
    Fault(
        "a launch without its output",
        "change('KERNEL', bind=lambda op, context: context.call(launch, op.ins[0]))",
        "kernel",
        LAUNCHES,
        "output 0 of acme_squared_relu reaches no launch",
    ),
    Fault(
        "a launch without the stream",
        "change('KERNEL', bind=lambda op, context: (launch, (context.pointer(op.outs[0]),)))",
        "kernel",
        LAUNCHES,
        "is not the stream",
    ),
    # ---- models
    Fault("dims forgets a key", "change('MODEL', dims=lambda c: c['gone'])", "model", READS, "KeyError: 'gone'"),
    Fault(
        "documents see each other",
        "change('OP', reference='sound_references:across_documents')",
        "model",
        DOCUMENTS,
        "tokens of the first document change the loss of the others",
    ),
    Fault(
        "tied copies of unknown tensors",
        "change('MODEL', tied_copies=lambda d: {'copy': 'heat'})",
        "model",
        FALLS,
        "failed in tied_copies",
    ),
    Fault(
        "weights that lack a param",
        "change('MODEL', weights=lambda d, w=MODEL.weights: w(d)[1:])",
        "model",
        FALLS,
        "failed in weights",
    ),
    Fault(
        "a metric of a model without loss_scale",
        MEASURING + "measuring(lambda b, batch: b.apply('fill', shape=(), dtype='fp32', value=1.0))",
        "model",
        SCALED,
        r"total \(.*, expected .*\) with scales of 0.5 and 0.25",
    ),
    Fault(
        "a metric of a model that counts tokens without a label",
        MEASURING + "measuring(lambda b, batch: batch.loss_scale, 'total')",
        "model",
        "metrics of a batch are the sums over its parts",
        r"total \(.*, expected .*\) of two parts of a batch",
    ),
    # ---- recipes
    Fault(
        "lower reads a state that nobody writes",
        LOWER + "def unset(f, c, b):\n"
        "    sink = b.state('sink', (4, 4), 'fp32', None)\n"
        "    b.emit('acme_squared_relu', b.state('acme', (4, 4), 'fp32', None), outs=[sink])\n"
        "lowering(unset)",
        "recipe",
        FALLS,
        "reads state acme, which nothing has set",
    ),
    Fault(
        "lower writes a param in a micro-step",
        LOWER + "def writing(f, c, b):\n"
        "    param = next(iter(c.params))\n"
        "    b.emit('acme_squared_relu', param, outs=[param])\n"
        "lowering(writing)",
        "recipe",
        FALLS,
        "writes param embedding.*only the update may",
    ),
    Fault(
        "lower collects means",
        LOWER + "lowering(lambda f, c, b: b.state('acme', (), 'fp32', None, collects='mean'))",
        "recipe",
        FALLS,
        "is 'mean', expected sum or max",
    ),
    Fault(
        "lower adds a dict to the ops",
        LOWER + "change('RECIPE', lower=lambda f, c: dataclasses.replace(f, micro=added(f.micro, {})))",
        "recipe",
        FALLS,
        r"is \{\}, expected an Op",
    ),
    Fault(
        "lower returns evaluate as micro",
        "change('RECIPE', lower=lambda f, c: dataclasses.replace(f, micro=f.evaluate))",
        "recipe",
        FALLS,
        "returned evaluate, of stage evaluate, in place of micro",
    ),
    Fault(
        "supports refuses without a reason",
        "change('RECIPE', supports=lambda device, precision, options: Support(device.sm is None))",
        "recipe",
        "every device is supported or refused with a reason",
        "without a reason",
    ),
    Fault(
        "norms with another eps",
        EPS + "def lower(f, c):\n"
        "    return dataclasses.replace(f, micro=lowered(f.micro), evaluate=lowered(f.evaluate))\n"
        "change('RECIPE', lower=lower)",
        "recipe",
        "it computes what transformers computes",
        "is wrong",
    ),
    Fault(
        "an evaluation that is not lowered",
        EPS + "change('RECIPE', lower=lambda f, c: dataclasses.replace(f, micro=lowered(f.micro)))",
        "recipe",
        "an evaluation computes the loss of a micro step",
        "an evaluation gives .* for rows of which a micro-step gives",
    ),
    Fault(
        "a state of derive that checkpoints hold",
        "def lower(f, c):\n"
        "    b, param = c.builder, next(iter(c.params))\n"
        "    copy = b.state('acme.copy', param.shape, 'bf16', None)\n"
        "    with b.record('derive') as ops:\n"
        "        b.emit('cast', param, outs=[copy], dtype='bf16')\n"
        "    again = [o.changed() for o in ops]\n"
        "    return f.appending(ops, again)\n"
        "change('RECIPE', lower=lower)",
        "recipe",
        DERIVED,
        "derive writes acme.copy, which is not declared `derived`",
    ),
    # ---- losses
    Fault(
        "a metric without its scale",
        "def unscaled(c):\n"
        "    one = c.builder.apply('fill', shape=(), dtype='fp32', value=1.0)\n"
        "    given = (c.head.x, c.head.weight, c.batch.targets, one)\n"
        "    return Loss([Metric('loss', c.builder.apply('lm_head_ce', *given, chunks=1))])\n"
        "change('LOSS', build=unscaled)",
        "loss",
        SCALED,
        r"loss \(.*, expected .*\) with scales of 0.5 and 0.25",
    ),
    # ---- optimizers
    Fault(
        "update returns a value",
        "change('OPTIMIZER', update=lambda c, u=OPTIMIZER.update: u(c) or 3)",
        "optimizer",
        FALLS,
        "returned 3",
    ),
    Fault(
        "clip_coef is ignored",
        UPDATE + "updating(lambda c, b, s, p, v: b.emit('cast', p.grad, outs=[p.master], dtype=p.master.dtype))",
        "optimizer",
        FALLS,
        "writes embedding without clip_coef",
    ),
    Fault(
        "the gradient is not clipped",
        UPDATE + "also('acme_one', 'torch:ones_like')\n"
        "updating(lambda c, b, s, p, v: sgd(c, b, s, p, v, b.apply('acme_one', c.clip_coef)))",
        "optimizer",
        "the gradient that it uses is clipped",
        "1024 times as large",
    ),
    Fault(
        "a momentum of gradients that are not clipped",
        UPDATE + "def lion(c, b, s, p, v):\n"
        "    b.emit('acme_lion', c.clip_coef, p.grad, p.master, v, outs=[p.master, v])\n"
        "LION = OpDef(kind='acme_lion', reference='sound_references:unclipped_lion', infer=lambda ins, attrs: [\n"
        "    OutSpec('master', ins[2].shape, ins[2].dtype), OutSpec('v', ins[3].shape, ins[3].dtype)])\n"
        "surogate_ops = hook('OP', 'UPDATE', 'INT8', 'FROM_INT8', 'LION')\n"
        "updating(lion)",
        "optimizer",
        "the gradient that it uses is clipped",
        "1024 times as large, clipped to the same norm, moves v.embedding",
    ),
    Fault(
        "the update goes uphill",
        UPDATE + "also('acme_neg', 'torch:neg')\n"
        "updating(lambda c, b, s, p, v: sgd(c, b, s, p, v, c.clip_coef, b.apply('acme_neg', p.grad)))",
        "optimizer",
        FALLS,
        "the loss is .* in step 1 and .* in step 8",
    ),
    Fault(
        "a skipped step changes a state",
        UPDATE + "also('acme_count', 'torch:add')\n"
        "def counted(c, b, s, p, v):\n"
        "    n = b.state(f'n.{p.param.name}', (), 'fp32', Init(kind='ones'))\n"
        "    b.emit('acme_count', n, n, outs=[n])\n"
        "    sgd(c, b, s, p, v, c.clip_coef)\n"
        "updating(counted)",
        "optimizer",
        SKIPS,
        "n.embedding",
    ),
    Fault(
        "an update that depends on its group",
        UPDATE + "def grouped(c, b, s, p, v):\n"
        "    sgd(c, b, s, p, v, c.clip_coef, momentum=0.5 / len(c.params))\n"
        "updating(grouped)",
        "optimizer",
        "groups by block have the bits of one group",
        "updated block by block",
    ),
    Fault(
        "a granularity that no rank can have",
        "change('OPTIMIZER', granularity=lambda p: 100)",
        "optimizer",
        DIVIDES,
        r"has the granularity 100, expected 1 or another power of two up to 256, \d+ \(all elements\) or 0",
    ),
    Fault(
        "an update that needs more than its granularity",
        UPDATE + "def of_shape(c, b, s, p, v):\n"
        "    sgd(c, b, s, p, v, c.clip_coef, momentum=0.5 / p.param.size)\n"
        "updating(of_shape)",
        "optimizer",
        DIVIDES,
        "on two ranks that divide states by its granularity, .* differ",
    ),
    Fault(
        "random states of parts",
        UPDATE + "def drawn(c):\n"
        "    b = c.builder\n"
        "    for p in c.params:\n"
        "        v = b.state(f'v.{p.name}', p.param.shape, 'fp32', Init(kind='normal', std=1e-3))\n"
        "        sgd(c, b, c.scalars, p, v, c.clip_coef)\n"
        "change('OPTIMIZER', update=drawn, granularity=lambda p: 1)",
        "optimizer",
        DIVIDES,
        "normal contents",
    ),
    Fault(
        "a state that no checkpoint has",
        UPDATE + "def forgetful(c):\n"
        "    for p in c.params:\n"
        "        b = c.builder\n"
        "        sgd(c, b, c.scalars, p, state(b, p, derived=True), c.clip_coef)\n"
        "change('OPTIMIZER', update=forgetful)",
        "optimizer",
        RESUMES,
        "the loss of step . is .*, without an interruption",
    ),
    Fault(
        "states in another dtype than the run's",
        UPDATE + "updating(lambda c, b, s, p, v: sgd(c, b, s, p, v, c.clip_coef))",
        "optimizer",
        DTYPE,
        "the same dtypes with optimizer_state_dtype: fp32 and bf16",
    ),
    Fault(
        "a dtype of states that it refuses",
        "from surogate_core.api import ConfigError\n"
        "def narrow(c, update=OPTIMIZER.update):\n"
        "    if c.precision.optimizer_state != 'fp32':\n        raise ConfigError('fp32 only')\n"
        "    update(c)\n"
        "change('OPTIMIZER', update=narrow)",
        "optimizer",
        DTYPE,
        "optimizer_state_dtype: bf16, which state_dtypes names, is refused: fp32 only",
    ),
    # ---- adapters
    Fault(
        "save writes nothing",
        "change('ADAPTER', save=lambda *given: None)",
        "adapter",
        FALLS,
        "failed in save: wrote nothing",
    ),
    Fault(
        "load raises another error",
        "def careless(folder, options):\n    open(folder / 'acme.json')\n    return load(folder, options)\n"
        "change('ADAPTER', load=careless)",
        "adapter",
        "its users can load it",
        "raises PluginError, not ConfigError",
    ),
    Fault(
        "load returns something else",
        "change('ADAPTER', load=lambda folder, options: {n: x * 2 for n, x in load(folder, options).items()})",
        "adapter",
        LOADED,
        "lm_head.weight is different",
    ),
    Fault(
        "merge scales wrongly",
        "def merged(folder):\n"
        "    m = merge(folder)\n"
        "    return dataclasses.replace(m, changes={n: (lambda t, f=f: f(t) * 0.5) for n, f in m.changes.items()})\n"
        "change('ADAPTER', merge=merged)",
        "adapter",
        "a merged model computes what model and adapter compute",
        "the loss with the adapter is .*, merged .*, of the base",
    ),
    Fault(
        "trainable chooses nothing",
        "change('ADAPTER', trainable=lambda param, stored, options: False)",
        "adapter",
        "only what it trains changes",
        "depends on no trainable param",
    ),
    # ---- weight formats
    Fault(
        "dequantize is wrong",
        "change('FROM_INT8', reference='sound_references:off_by_one')",
        "weight format",
        "a weight keeps the precision of its bits",
        "comes back with .* dB; 8.5 bits a weight keep at least",
    ),
    Fault(
        "bits that it does not take",
        "change('WEIGHT_FORMAT', bits=4.0)",
        "weight format",
        STATED,
        "8.4. bits, it states 4",
    ),
    Fault(
        "quantize declares another shape",
        "def flat(context):\n"
        "    b, info = context.builder, context.param\n"
        "    codes = b.state(f'{info.param.name}.codes', (info.param.size,), 'uint8', None, derived=True)\n"
        "    scale = b.state(f'{info.param.name}.scale', (info.param.shape[0], 1), 'fp32', None, derived=True)\n"
        "    return b.emit('acme_int8', info.param, outs=[codes, scale])\n"
        "change('WEIGHT_FORMAT', quantize=flat)",
        "weight format",
        "an adapter trains on it and resumes to the bit",
        "failed in quantize: .*should have shape",
    ),
    Fault(
        "a stored weight that checkpoints hold",
        "def kept(context):\n"
        "    b, matrix = context.builder, context.param.param\n"
        "    codes = b.state(f'{matrix.name}.codes', matrix.shape, 'uint8', None)\n"
        "    scale = b.state(f'{matrix.name}.scale', (matrix.shape[0], 1), 'fp32', None)\n"
        "    return b.emit('acme_int8', matrix, outs=[codes, scale])\n"
        "change('WEIGHT_FORMAT', quantize=kept)",
        "weight format",
        DERIVED,
        "derive writes .*codes.*, which is not declared `derived`",
    ),
    Fault(
        "a checkpoint is read otherwise than written",
        "def shifted(tensor, parts, options):\n    return [parts[tensor.name] // 2, parts[f'{tensor.name}.scale']]\n"
        "change('WEIGHT_FORMAT', checkpoints=dataclasses.replace(CHECKPOINTS, load=shifted))",
        "weight format",
        "a checkpoint in it is read as it was written",
        "is not what checkpoints.save was given",
    ),
    # ---- offload strategies
    Fault(
        "on_host returns nothing",
        "change('OFFLOAD', on_host=lambda family, context: [])",
        "offload",
        "a run with it has the bits of one without",
        "failed in on_host: returned nothing",
    ),
    Fault(
        "it is always selected",
        "change('OFFLOAD', selected=lambda options: True)",
        "offload",
        "it is off unless a key selects it",
        "selected by the defaults",
    ),
    Fault(
        "what it proposes does not select it",
        "change('OFFLOAD', selected=lambda options: False)",
        "offload",
        "it is off unless a key selects it",
        "does not select it",
    ),
    # ---- dataset formats
    Fault(
        "fewer marks than tokens",
        "change('FORMAT', encode=lambda row, t, o: Encoded([5, 6], [True]))",
        "format",
        ROWS,
        "2 tokens, but 1 of trained|expected",
    ),
    Fault(
        "a row that is changed",
        "def popping(row, t, o):\n    return encode({'acme': row.pop('acme', '')}, t, o)\n"
        "change('FORMAT', encode=popping)",
        "format",
        ROWS,
        "encode changes the row",
    ),
    Fault(
        "a document that differs from call to call",
        "import itertools\nCALLS = itertools.count()\n"
        "change('FORMAT', encode=lambda row, t, o: Encoded([next(CALLS)], [True]))",
        "format",
        ROWS,
        "a second call returns",
    ),
    Fault(
        "a bad row that raises",
        "change('FORMAT', encode=lambda row, t, o: Encoded(t.encode_ids(row['acme'] + ''), [True] * len(row['acme'])))",
        "format",
        BAD,
        "raises .*TypeError.*, expected a ConfigError",
    ),
    Fault(
        "a column that fields does not name",
        "change('FORMAT', encode=lambda row, t, o: encode({'acme': row['acme'], 'more': row.get('weight')}, t, o))",
        "format",
        COLUMNS,
        "encode reads weight",
    ),
    # ---- loggers
    Fault(
        "a logger that exits",
        "class Exits(Lines):\n    def report(self, report):\n        raise SystemExit(7)\n"
        "change('LOGGER', open=lambda info, options: Exits(info.output_dir))",
        "logger",
        REPORTS,
        "SystemExit: 7",
    ),
    Fault(
        "a logger that adds up None",
        "class Adds(Lines):\n    def report(self, report):\n        return getattr(report, 'power_watts', 0) + 1\n"
        "change('LOGGER', open=lambda info, options: Adds(info.output_dir / 'x'))",
        "logger",
        REPORTS,
        "TypeError: unsupported operand",
    ),
    Fault(
        "a logger without a method",
        "class Bare:\n    def report(self, report): ...\nchange('LOGGER', open=lambda info, options: Bare())",
        "logger",
        REPORTS,
        "expected an instance of Logger|has no method",
    ),
    # ---- launchers
    Fault(
        "a launcher that takes every run",
        "change('LAUNCHER', matches=lambda environment: 'always')",
        "launcher",
        "it is chosen only in its own environment",
        "would start every run",
    ),
    Fault(
        "a world with a gap",
        "change('LAUNCHER', join=lambda here, options: World(size=2))",
        "launcher",
        "without its processes it is one or is refused",
        "has .2, 1, 1, 1, 1. ranks",
    ),
]
