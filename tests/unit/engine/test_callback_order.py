"""The order of the built-in callbacks keeps what each class says of its place."""

from hvdtrain.core.resolve import in_slot
from hvdtrain.engine.callbacks.base import Callback
from hvdtrain.engine.callbacks.order import FIRST, LAST, REPORTS

ORDER = [cls.__name__ for cls in (*FIRST, *REPORTS, *LAST)]


def test_each_class_is_where_it_says():
    for cls in (*FIRST, *REPORTS, *LAST):
        place = ORDER.index(cls.__name__)
        assert all(ORDER.index(other) > place for other in cls.before), f"{cls.__name__} before {cls.before}"
        assert all(ORDER.index(other) < place for other in cls.after), f"{cls.__name__} after {cls.after}"


def test_what_has_state_sees_an_event_before_it_is_saved():
    stateful = [cls.__name__ for cls in (*FIRST, *REPORTS, *LAST) if cls.state_dict is not Callback.state_dict]
    assert all(ORDER.index(name) < ORDER.index("Checkpoint") for name in stateful) and len(stateful) > 5


def test_every_file_of_the_folder_has_a_place():
    package = "hvdtrain.engine.callbacks"
    files = {n for n in in_slot(package, "Callback")} - {"base", "order", "history"}
    assert files == {cls.__module__.removeprefix(f"{package}.") for cls in (*FIRST, *REPORTS, *LAST)}
