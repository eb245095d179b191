"""Prediction finds the images that training finds."""

from tanager.use.inputs import list_images


def test_a_folder_is_listed_as_training_lists_it(tmp_path):
    for name in (
        "b.PNG",
        "a.jpg",
        ".c.png",
        "notes.txt",
        "below/d.png",
        "__MACOSX/e.png",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    for name in ("1.2.840.10008", "IM0001"):  # scanners give DICOM files no ending
        (tmp_path / name).write_bytes(bytes(128) + b"DICM")
    (tmp_path / "README").write_bytes(b"words")
    files, others = list_images([tmp_path])
    names = ["1.2.840.10008", "IM0001", "a.jpg", "b.PNG", "below/d.png"]
    assert files == [str(tmp_path / name) for name in names]
    assert others == {".txt": 1, "without an ending": 1}
