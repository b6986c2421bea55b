"""Questions that many users ask of the Python language reference, in arrival order.

The questions and their order are written for the demo; they are not a log of real traffic.
Several users ask about each theme in their own words, and follow-up questions of a
conversation arrive between the questions of other users.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DemoQuestion:
    """One question as it reaches the server.

    Attributes:
        text: The question in the user's words.
        conversation: Name of the conversation it belongs to, or None for a single question.
        turn: Position in its conversation, from 0.
    """

    text: str
    conversation: str | None
    turn: int


Question = DemoQuestion
"""The former name of `DemoQuestion`."""


def _parse(log: str) -> Iterator[DemoQuestion]:
    """Yield the questions of a log whose entries are a label and a text.

    The label is ``-`` for a single question and ``conversation/turn`` otherwise. Indented
    lines continue the entry above them.
    """
    for entry in re.split(r"\n(?=\S)", log.strip()):
        label, text = entry.split(maxsplit=1)
        conversation, _, turn = label.partition("/")
        words = " ".join(text.split())
        if turn:
            yield DemoQuestion(words, conversation, int(turn))
        else:
            yield DemoQuestion(words, None, 0)


_LOG = r"""
chat-01/0  I have functions nested in functions. How does Python decide which enclosing scope a
           name comes from?
-          Why is a list defined in the class body shared by all instances, and how do I make it an
           instance attribute with self.name = value?
-          If I only implement __lt__ and __eq__, do the other rich comparison methods like __le__
           follow automatically?
-          Is `with A() as a, B() as b` the same as two nested with statements? Which one exits
           first?
chat-01/1  My method raises NameError for a name I defined in the class block. Is the class scope
           not visible inside methods?
chat-02/0  def f(x=[]): why is the empty list default parameter value shared between calls?
-          How does "x in y" work for a user-defined class without __contains__(), does the
           membership test use __iter__?
-          I defined __eq__ and now my class is unhashable. Do I have to define __hash__ as well?
chat-03/0  What is the difference between __getattr__ and __getattribute__, which method is called
           first on attribute access?
chat-04/0  In which order are except clauses checked, does the first one matching the exception win
           in a try statement?
chat-02/1  How do I make parameters keyword-only in a function definition, by putting them after *
           or *args?
chat-04/1  When is the optional else clause of a try statement executed, and are exceptions in it
           handled by the preceding except clauses?
chat-03/1  How do I avoid infinite recursion when I override __getattribute__ or __setattr__ to
           customize attribute access?
-          Can I decorate a class like a function, and is the result of the class decorator bound
           to the class name?
-          How can I create an alias with parameters for pdb commands, and put it in a .pdbrc file?
-          In pdb how do I print a stack trace and move the current frame up or down to older
           frames?
-          SyntaxError: name 'x' is used prior to global declaration. Does the global statement
           have to come before any use in the same code block?
-          Can I still use the loop variable after the for loop finished? What if the sequence was
           empty?
chat-05/0  I want d[key] to compute a default if the key is missing. Does a dict subclass need
           __missing__() instead of a KeyError?
chat-04/2  If finally has a return or break, is the exception lost (discarded)?
-          When do I need nonlocal instead of global to rebind a variable of the outer function?
chat-05/1  What is the difference between the dict methods get(key, default) and setdefault(key,
           default) if the key is missing?
-          Why do all inner lists change when I create lists = [[]] * 3, are the items in the
           sequence not copied?
chat-01/2  And does a generator expression or comprehension inside the class block see the names
           defined in the class scope?
-          What does a function call return if the function never executes a return statement?
-          How do I re-raise the exception that is currently being handled: raise with no
           expressions?
chat-03/2  How do descriptors with __get__ and __set__ change attribute access through an instance?
chat-04/3  NameError for e after `except E as e`: why is the exception variable cleared at the end
           of the except clause?
chat-06/0  TypeError: metaclass conflict. How does Python determine the metaclass of a class that
           inherits from several bases?
chat-02/2  And the / in the parameter list of a function definition, does it make the parameters
           before it positional-only?
chat-05/2  Which pair does popitem() remove, LIFO order? And does pop(key) on the dictionary raise
           a KeyError?
-          Should I use casefold() or lower() for caseless matching of strings, e.g. the German
           letter ß?
-          Can I give variables in __slots__ default values with class attributes? I get a
           ValueError about a conflict with the descriptor.
-          Why do I get UnboundLocalError when I assign to a variable in a function that is also
           defined at module level?
chat-02/3  TypeError: got multiple values for keyword argument. Is that because the call unpacks
           **mapping on top of a keyword argument?
chat-06/1  What is __prepare__ on a metaclass for, and in which namespace is the class body
           executed?
-          why doesn't assigning to the loop variable inside a for loop over range(10) change the
           number of iterations?
-          Is list.sort() guaranteed to be stable, and what do the key and reverse arguments do?
chat-04/4  How do except* clauses handle an ExceptionGroup, can several clauses execute for one
           group?
-          How do I get rid of "During handling of the above exception, another exception
           occurred", with raise ... from None?
-          How do I merge two dictionaries with d | other, and whose values take priority when keys
           are shared?
chat-04/5  Can I mix except and except* in one try, and why can't I put break, continue or return
           in an except* clause?
chat-06/2  How does the zero-argument super() know its class when the class object is created by
           the metaclass, what is __classcell__?
-          In `with open(p) as f`, is f the context manager or whatever __enter__() returned?
-          How do I make an instance callable as a function with __call__?
chat-06/3  Could I use __init_subclass__ instead of a metaclass to register subclasses of a parent
           class?
-          What is a temporary breakpoint in pdb and how do I clear or disable breakpoints?
chat-01/3  If I del a name inside a function, is only the local binding removed, or does the global
           name go away too?
chat-06/4  If I write class A(Base, flag=True), where do the keyword arguments of the class
           definition go: __init_subclass__ or the metaclass?
-          What's the difference between append, extend and insert on a mutable sequence, and does
           pop() return the item?
-          Why is -7 // 2 equal to -4, and -7 % 2 positive? What are the rules for floor division
           and modulo with negative numbers?
chat-01/4  Why can't eval() or exec() see the variables of the enclosing function? Are free
           variables only resolved in the global namespace?
-          Are assert statements skipped with python -O, and what is __debug__? I can't assign to
           it.
-          My script crashed with an exception: how do I enter post-mortem debugging of the
           traceback with pdb?
-          Which pdb commands list the source code around the current line or for the whole current
           function?
-          What do the prefixes r, b and f on string and bytes literals mean, how do raw strings
           treat backslashes?
-          Should I override __new__() or __init__() to set up a new instance, which one is called
           first when the class is called?
-          Is x >> n just floor division by a power of two? What do the shifting operators do with
           integers?
chat-07/0  What does the import statement do, step by step: find the module, load it, then define a
           name in the local namespace?
-          What do __self__ and __func__ of a bound method refer to, can I set an attribute on the
           bound method?
chat-03/3  What is a data descriptor versus a non-data descriptor when the instance dictionary has
           an entry of the same name?
-          How does MyClass[int] work, what does __class_getitem__ have to return for a generic
           class?
-          In an annotated assignment statement, is the annotation evaluated for a simple name in a
           class or module scope, and inside a function?
-          Does a sequence pattern succeed on str or bytes subjects, and how does a star subpattern
           bind the rest?
chat-08/0  What is the syntax of the format specification mini-language: fill, align, sign, width,
           precision?
-          In "import foo.bar as f" versus "import foo.bar", which module gets bound in the local
           namespace, the top level package or foo.bar?
-          DeprecationWarning for "\d" in a string literal: which escape sequences are recognized,
           is the backslash left in the string?
chat-03/4  What's the owner argument in a descriptor's __get__(self, instance, owner), and what is
           instance if I access it through the class?
chat-08/1  How do I zero pad numbers to a width with the format specification, with the sign in
           front of the zeros?
chat-08/2  Which presentation types are available for floats in the format specification:
           fixed-point, scientific, general format?
chat-08/3  Can the format specification use a comma or underscore as a thousands separator for
           integers?
-          I continue inside a try block in a loop. Does the finally clause still execute before
           the next cycle?
-          How does str.split behave if sep is None, are runs of consecutive whitespace one
           separator, what is maxsplit?
-          Which predefined attributes does a module have, and can __file__ or __doc__ be missing
           for some modules?
chat-08/4  What do !r, !s and !a in a replacement field do, is the conversion done before the value
           is formatted?
-          Can an exception handler repair the cause of the error and retry the failed piece of
           code, or is it a termination model?
-          Can I nest replacement fields in an f-string, e.g. for the width, and what does f"{x=}"
           with the equal sign after the expression do (formatted string literals)?
chat-09/0  How do negative indices count from the end when I take a slice of a sequence s[i:j], and
           what if i is omitted?
-          What should __repr__() return compared with __str__(), and is __repr__ used when only
           that is defined?
-          for ... else confuses me: does the else clause run if the for loop was left with break?
-          How are the parameter annotations and the return annotation after -> stored, in the
           __annotations__ attribute of the function?
chat-07/1  How do relative imports work, how many leading dots do I need in from ... import to go
           up one package?
-          Which methods implement augmented arithmetic assignments such as += and what happens if
           __iadd__ isn't defined?
-          Can I set the next line that will be executed in pdb, jump back and execute code again
           or skip code?
chat-03/5  Is property() a data descriptor too, is that why an instance can't override a property?
-          What is __mro_entries__ for? One of my bases in the class definition isn't a type.
-          Does x += [1] modify the list in-place or create a new object like x = x + [1]? How is
           augmented assignment different?
-          Since when is the key evaluated before the value in a dict comprehension, and what's its
           syntax with two expressions and a colon?
-          AttributeError when I assign a new attribute to an instance of a class with __slots__.
           Is there no __dict__ then?
-          RuntimeError: dictionary changed size during iteration. Are keys() and items() views
           dynamic, can't I delete entries while iterating?
-          How do I evaluate an expression, pretty-print a value or start an interactive
           interpreter from inside pdb?
-          try: return 'a' finally: return 'b' - which return value do I get, the one from the
           finally clause?
-          How does Python test the truth value of my object if I define __len__() but not
           __bool__()?
-          How do I write hexadecimal, octal or binary integer literals, are underscores allowed
           between digits?
-          SyntaxError: alternative patterns bind different names. Must each subpattern of an OR
           pattern bind the same names?
-          What counts as binding a name? Do import statements, function parameters, for loops and
           except clauses all bind names?
chat-10/0  I set __len__ on one instance and len() ignores it. Are implicit invocations of special
           methods only looked up on the object's type, not in its instance dictionary?
chat-11/0  How does a match statement pick the case block to execute, does it fall through like
           switch in C?
chat-07/2  Which public names does "from module import *" import if the module does not define
           __all__?
-          Do "and" and "or" always return True or False, or do they return the last evaluated
           argument?
-          why is ~5 equal to -6? what does the unary bitwise inversion yield for an integer
chat-09/1  What does the step k in s[i:j:k] do, and what happens if the step is negative or zero?
-          what's the difference between isdecimal(), isdigit() and isnumeric() for characters such
           as superscript digits?
-          Does `x: int` without a value on the right hand side bind the variable in an annotated
           assignment?
-          How can I override isinstance() and issubclass() with __instancecheck__ on the
           metaclass?
-          I stacked two decorators on a function definition. In which order are they applied,
           inside out?
chat-11/1  What is an irrefutable case block in a match statement, and must it be the last one?
chat-10/1  Does the implicit special method lookup also bypass __getattribute__, even that of the
           metaclass?
chat-11/2  How do guards work in case blocks, is the guard expression evaluated only after the
           pattern succeeded?
-          does the wildcard pattern _ bind a name, and does it always succeed?
chat-07/3  SyntaxError: import * only allowed at module level. Can't I use the wildcard form inside
           a function?
chat-10/2  If I set a special method like __iter__ to None in my class, what does iter() raise
           then?
chat-12/0  Is there a table of operator precedence in Python from highest to lowest?
chat-11/3  How does a class pattern such as Point(x=0, y=0) check the subject with isinstance, and
           how does __match_args__ convert positional patterns?
chat-13/0  How does assignment to a target list with a starred target like a, *rest = seq collect
           the remaining items?
chat-09/2  Can I assign a longer list to a slice, s[i:j] = t? And with a step, must t have the same
           length as the slice it is replacing?
chat-12/1  Why is -1**2 equal to -1? Does the power operator bind more tightly than unary minus?
-          Where does Python find builtins like print if the name is not in the global namespace,
           and what is __builtins__?
-          What does the __dict__ of a module hold, can I modify the module's symbol table through
           it?
-          What is a future statement like "from __future__ import annotations" and why must it
           appear near the top of the module?
-          When does CPython free an unreachable object, and what about circular references:
           reference counting or the garbage collector?
-          Which special attributes does a user-defined function object have, such as __defaults__,
           __closure__ and __code__?
chat-13/1  Does a, b = b, a always work? What about i, x[i] = 1, 2 where the assignment targets
           overlap?
chat-12/2  Where do not, and, or sit in the operator precedence relative to comparisons including
           in and is?
chat-14/0  How do I write my own context manager class that works in a with statement, using
           __enter__ and __exit__?
chat-15/0  How do I break into the pdb debugger from a running program, insert breakpoint() or
           pdb.set_trace()?
-          How do I set my own traceback on an exception in one step with with_traceback() when
           raising it?
-          x = y = [] - do both targets of the assignment statement get the same object, assigned
           left to right?
chat-14/1  Which arguments does __exit__ get when the with block raised an exception, and how can I
           suppress the exception?
chat-13/2  Can an augmented assignment such as += have several targets or tuple unpacking like a
           normal assignment statement?
chat-12/3  And can I chain comparisons like a < b < c? Is b evaluated only once?
-          Why is float('NaN') not equal to itself, and what do comparisons of not-a-number values
           return?
chat-14/2  If __enter__() itself raises an error, will the with statement still call __exit__()?
chat-09/3  What does __getitem__ receive for a slice like x[1:3] when I emulate a sequence, a slice
           object?
chat-15/1  pdb: what's the difference between step and next? I don't want to stop inside a called
           function of the current line.
chat-16/0  Where may I use await expressions, async for and async with? I got SyntaxError outside a
           coroutine function.
chat-11/4  What is the difference between a capture pattern with a bare NAME and a value pattern
           with a dotted name?
chat-15/2  How do I set a breakpoint with a condition in the debugger, and how do I ignore a
           breakpoint a number of times?
-          Why use range instead of a list, does a range object always take the same amount of
           memory?
-          Can I define __getattr__ in a module to customize module attribute access, e.g. to warn
           about deprecated names?
chat-15/3  Can pdb run a list of commands automatically each time a breakpoint number is hit, e.g.
           print a variable and continue?
-          what's a free variable of a code block and when is it looked up, e.g. a closure that
           uses a variable that changes later (late binding at run time)?
chat-16/1  What does the async for statement do step by step with an asynchronous iterable?
-          In what order does the del statement delete a target list, and can I del a slice or an
           attribute reference?
-          What does "raise NewError from exc" do, how is __cause__ different from the implicitly
           attached __context__?
-          3 + MyNumber() fails with TypeError. When does Python call the reflected __radd__ of the
           right operand?
chat-17/0  Is one yield anywhere in the body enough to turn a function definition into a generator
           function?
-          Inside __exit__(), should my context manager reraise the exception it was passed or is
           that the caller's responsibility?
chat-17/1  My generator function does `return 42`. Where does that value go, into StopIteration?
chat-17/2  What about yield from: can I use it as a statement, or does the yield expression need
           parentheses in a generator function?
chat-16/2  And async with, is it just awaiting __aenter__ and __aexit__ of an asynchronous context
           manager?
chat-17/3  And if I yield inside an async def function, is that an asynchronous generator function?
           Can it still return a value?
-          `from package import name`: does it try to import a submodule called name before it
           raises ImportError?
-          Why does lstrip remove too many characters, should I use removeprefix(prefix) instead of
           the chars argument of strip?
-          Which values may be used as dictionary keys, why can't I use a list as a key, what does
           hashable mean?
-          Is it slow to build up a string or tuple in a loop by repeated concatenation? Is the
           runtime quadratic for immutable sequences?
-          Are match, case and _ reserved words or soft keywords, can I still use them as
           identifiers?
-          Can I open two files in a single with statement, and put parentheses around the items to
           break the line?
-          When a call uses *expression unpacking, can positional or keyword arguments come after
           it, and in what order are they processed?
-          Why does a.x = a.x + 1 on an instance leave the class attribute alone and create an
           instance attribute on the left-hand side?
-          Do dictionaries preserve insertion order, and does updating a key affect the order of
           the dict?
-          I called a generator function and nothing ran. Is the body only executed when I call
           next() on the iterator it returned?
-          how do I customize what dir() shows for my objects? what does __dir__ need to return
-          When I read an attribute of a class instance, is the instance __dict__ searched first
           and then the class attributes?
-          When is __del__() called? Mine doesn't seem to run for objects that still exist when the
           interpreter exits.
-          Can lambda expressions contain statements or annotations, or only a single expression?
-          Does a mapping pattern like {'x': x} fail if the dict has extra keys, and how do I
           capture the rest with double star?
-          What do I get when I call an asynchronous generator function without async for, and what
           does its __anext__ method return?
-          {'a': 1, **other, 'a': 2}: in a dict display with duplicate keys and ** unpacking, does
           the last one win?
"""

QUESTIONS: tuple[DemoQuestion, ...] = tuple(_parse(_LOG))
"""Every question in arrival order."""
