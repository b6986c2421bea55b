import pickle
import re

from ctxreuse.errors import CtxreuseError
from ctxreuse.workflow import errors
from ctxreuse.workflow.errors import StageError


def test_every_error_is_drawn_in_the_tree_and_has_the_builtin_that_fits():
    classes = {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception) and name[0] != "_"
    }
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__)
    assert set(classes) == {"CtxreuseError", "WorkflowError", *drawn}
    assert errors.WorkflowError.__bases__ == (CtxreuseError,)
    others = {"GraphError": ValueError, "StateKeyError": KeyError, "DeadlineError": TimeoutError}
    for name in drawn:
        assert issubclass(classes[name], errors.WorkflowError), name
        assert issubclass(classes[name], others.get(name, RuntimeError)), name


def test_an_error_shows_its_message_and_node_in_another_process_too():
    error = StageError("node 'a' failed", "a", 2)
    assert (str(error), error.node, error.visit) == ("node 'a' failed", "a", 2)
    assert str(errors.DeadlineError("too late")) == "too late"
    assert str(errors.StateKeyError("the state has no 'a'", "a")) == "the state has no 'a'"
    error = pickle.loads(pickle.dumps(StageError("node 'a' failed", "a", 2)))
    assert (str(error), error.node, error.visit) == ("node 'a' failed", "a", 2)
