# Made from book/g-gpu-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-paper-abreast
"""A kernel's source for many threads at once: where they diverge, each side runs under a mask.

Threads that go abreast have one place in the code. So an `if` about which they disagree becomes
both of its sides, one after the other; a loop goes on until the last has left it. What a side
assigns counts for its own threads only. `rewritten` changes the source so, on its syntax tree; the
names that it calls are in `lockstep.MEANINGS`.
"""

import ast
import functools
import linecache
from collections.abc import Iterator
from types import CodeType


class Unknown(Exception):
    """Source that has no form for many threads at once, or is not what runs."""


def assigned(nodes: list[ast.stmt]) -> list[str]:
    """The names that these statements assign, without those that a rewriting made."""
    names = {
        part.id
        for node in nodes
        for part in ast.walk(node)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }
    return sorted(name for name in names if not name.startswith("_at"))


def returns(node: ast.AST) -> bool:
    """Whether it contains a return."""
    return any(isinstance(part, ast.Return) for part in ast.walk(node))


def single(body: list[ast.stmt]) -> list[ast.stmt]:
    """The same with each return last in its branch: what follows such an `if` is its else."""
    for n, node in enumerate(body):
        if isinstance(node, ast.If) and returns(node):
            yes, no, rest = node.body, node.orelse, body[n + 1 :]
            if rest and ends(yes):
                no = no + rest
            elif rest and no and ends(no):
                yes = yes + rest
            elif rest:
                raise Unknown("a return in a branch that may go on")
            node.body, node.orelse = single(yes), single(no)
            return body[: n + 1]
        if isinstance(node, ast.For | ast.While) and returns(node):
            raise Unknown("a return in a loop")
    return body


def ends(body: list[ast.stmt]) -> bool:
    """Whether it returns in any case."""
    last = body[-1]
    if isinstance(last, ast.If) and last.orelse:
        return ends(last.body) and ends(last.orelse)
    return isinstance(last, ast.Return)


def lazy(node: ast.expr) -> ast.Lambda:
    """An expression that is evaluated later, perhaps for some threads only."""
    later = parse("lambda: 0")[0].value
    later.body = node
    return later


def parse(text: str) -> list[ast.stmt]:
    """Statements."""
    return ast.parse(text).body


def called(name: str, *args: ast.expr) -> ast.Call:
    """A call of one of `lockstep.MEANINGS`."""
    return ast.Call(ast.Name(name, ast.Load()), list(args), [])


def asked(at: str, method: str, *args: ast.expr) -> ast.Call:
    """A call of a method of the object for such a place."""
    return ast.Call(ast.Attribute(ast.Name(at, ast.Load()), method, ast.Load()), list(args), [])


class Rewriting(ast.NodeTransformer):
    """Statements and expressions, so that each side is evaluated for its own threads."""

    def __init__(self) -> None:
        self.count = 0  # places where threads may part
        self.loops: list[str] = []

    def refuse(self, node: ast.AST) -> None:
        """No form."""
        raise Unknown(type(node).__name__)

    visit_Try = visit_With = visit_Yield = visit_YieldFrom = refuse
    visit_Global = visit_Nonlocal = visit_NamedExpr = visit_Lambda = refuse
    visit_FunctionDef = visit_ClassDef = visit_Match = visit_Delete = refuse
    visit_ListComp = visit_GeneratorExp = visit_SetComp = visit_DictComp = refuse

    def leave(self, node: ast.Break | ast.Continue) -> list[ast.stmt]:
        """Out of a round, only where all leave together."""
        return [*parse(f"{self.loops[-1]}.leave()"), node]

    visit_Break = visit_Continue = leave

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        """`a if b else c`."""
        self.generic_visit(node)
        return called("_pick", node.test, lazy(node.body), lazy(node.orelse))

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        """`and`, `or`."""
        self.generic_visit(node)
        name = "_both" if isinstance(node.op, ast.And) else "_either"
        *first, last = node.values
        for value in reversed(first):
            last = called(name, value, lazy(last))
        return last

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        """`not`."""
        self.generic_visit(node)
        return called("_negate", node.operand) if isinstance(node.op, ast.Not) else node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        """`a < b < c`."""
        self.generic_visit(node)
        if len(node.ops) == 1:
            return node
        sides = [node.left, *node.comparators]
        if not all(isinstance(side, ast.Name | ast.Constant) for side in sides[1:-1]):
            raise Unknown("a comparison in a row")
        parts = [
            ast.Compare(a, [op], [b]) for a, op, b in zip(sides, node.ops, sides[1:], strict=False)
        ]
        last: ast.expr = parts[-1]
        for part in reversed(parts[:-1]):
            last = called("_both", part, lazy(last))
        return last

    def fresh(self) -> str:
        """A name for one such place."""
        self.count += 1
        return f"_at{self.count}"

    def block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """A body, rewritten."""
        new: list[ast.stmt] = []
        for node in body:
            made = self.visit(node)
            new += made if isinstance(made, list) else [made]
        return new or [ast.Pass()]

    def loop(self, at: str, body: list[ast.stmt]) -> list[ast.stmt]:
        """The body of a loop: assignments count for threads that have not left it."""
        self.loops.append(at)
        body = self.block(body)
        self.loops.pop()
        names = assigned(body)
        return [*keep(at, names), *body, *merge(at, names, "join")]

    def visit_If(self, node: ast.If) -> list[ast.stmt]:
        """Both sides, each for its own threads."""
        at, test = self.fresh(), self.visit(node.test)
        yes, no = self.block(node.body), self.block(node.orelse) if node.orelse else []
        names = assigned(yes + no)
        new = [
            ast.Assign([ast.Name(at, ast.Store())], called("_split", test)), *keep(at, names),
            ast.If(asked(at, "first"), yes, []),
        ]  # fmt: skip
        if no:
            new += [*merge(at, names, "turn"), ast.If(asked(at, "second"), no, [])]
        return [*new, *merge(at, names, "join")]

    def visit_While(self, node: ast.While) -> list[ast.stmt]:
        """Until the last thread has left."""
        if node.orelse:
            raise Unknown("an else of a loop")
        at, test = self.fresh(), self.visit(node.test)
        body = self.loop(at, node.body)
        head, end = parse(f"{at} = _While()"), parse(f"{at}.end()")
        return [*head, ast.While(asked(at, "test", test), body, []), *end]

    def visit_For(self, node: ast.For) -> list[ast.stmt]:
        """The same over numbers."""
        if node.orelse:
            raise Unknown("an else of a loop")
        at, over = self.fresh(), self.visit(node.iter)
        body = self.loop(at, node.body)
        head = ast.Assign([ast.Name(at, ast.Store())], called("_For", over))
        return [head, ast.For(node.target, ast.Name(at, ast.Load()), body, [])]

    def visit_Return(self, node: ast.Return) -> list[ast.stmt]:
        """It is the last in its branch: the value is returned at the end."""
        value = self.visit(node.value) if node.value else ast.Constant(None)
        return [ast.Assign([ast.Name("_out", ast.Store())], value)]


# %% sec-paper-abreast
def keep(at: str, names: list[str]) -> list[ast.stmt]:
    """Keep the names' values before threads diverge."""
    return parse(f"if {at}.mixed: {at}.keep({names!r}, locals())") if names else []


def merge(at: str, names: list[str], how: str) -> list[ast.stmt]:
    """At the end of a side: the names as `how` says."""
    left = f"{', '.join(names)}, = " if names else ""
    values = "locals()" if names else "{}"
    return parse(f"if {at}.mixed: {left}{at}.{how}({values})")


def changed(body: list[ast.stmt]) -> list[ast.stmt]:
    """The body of a function for many threads at once. Changes the tree that it is given."""
    statements, some = Rewriting(), any(map(returns, body))
    many = any(returns(node) and not isinstance(node, ast.Return) for node in body)
    body = statements.block(single(body) if many else body)
    return [*parse("_out = None"), *body, *parse("return _out")] if some else body


def codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and those inside it."""
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from codes(part)


def begins(node: ast.stmt) -> int:
    """The line where a statement begins, with its decorators."""
    return min(part.lineno for part in (node, *getattr(node, "decorator_list", [])))


class Changed(ast.NodeTransformer):
    """A statement of a module, each function in it changed that has a form, and emptied that has
    none; `done`: the lines where the changed ones begin."""

    def __init__(self) -> None:
        self.done: set[int] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Those that have no function inside."""
        if any(isinstance(n, ast.FunctionDef) for part in node.body for n in ast.walk(part)):
            self.generic_visit(node)
            return node
        try:
            node.body = changed(node.body)
        except Unknown:
            node.body = [ast.Pass()]
        else:
            self.done.add(begins(node))
        return node


def place_of(code: CodeType) -> tuple:
    """The place that a function and its rewritten form have in common."""
    return code.co_firstlineno, code.co_name, code.co_freevars


class Source:
    """A file's code objects as they are (`plain`), and as changed: a statement of the file at a
    time, when somebody asks for a function of it, since a kernel uses few of a module's."""

    def __init__(self, filename: str, text: str):
        self.filename, self.statements = filename, ast.parse(text).body
        self.plain = set(codes(compile(text, filename, "exec", dont_inherit=True)))
        self.changed: dict[int, dict] = {}

    def around(self, line: int) -> dict:
        """By their place, the changed code objects of the statement that has a line."""
        n = sum(begins(node) <= line for node in self.statements) - 1
        if n not in self.changed:
            change = Changed()
            tree = ast.Module([change.visit(self.statements[n])], [])
            code = compile(ast.fix_missing_locations(tree), self.filename, "exec", 0, True)
            found = {place_of(c): c for c in codes(code) if c.co_firstlineno in change.done}
            self.changed[n] = found
        return self.changed[n]


source = functools.lru_cache(32)(Source)  # a file with its text


@functools.lru_cache(1024)
def rewritten(code: CodeType) -> CodeType:
    """The code for many threads at once; Unknown where there is none.

    It is made of the source, so a function whose source is not what runs has none.
    """
    linecache.checkcache(code.co_filename)
    text = "".join(linecache.getlines(code.co_filename))
    file = source(code.co_filename, text)
    if code not in file.plain or place_of(code) not in file.around(code.co_firstlineno):
        raise Unknown(code.co_qualname)
    return file.around(code.co_firstlineno)[place_of(code)]
