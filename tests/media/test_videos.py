"""Videos of rows become frames, and what is wrong with one is said."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbatch.base.errors import RequestError
from cbatch.base.request import Request
from cbatch.media import decoding
from cbatch.media.decoding import decode_video
from cbatch.media.pictures import MediaSources, Picture, Video, as_given
from cbatch.requests.rows import fill_row

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

SIZE, COUNT = (48, 32), 12
"""Width and height, and the number of frames."""

FORMATS = {"mp4": "mpeg4", "mov": "h264", "webm": "libvpx-vp9", "matroska": "mpeg4", "avi": "mpeg4", "mpegts": "h264"}
PLACE = "video 1 of message 1"


def flat(number: int) -> Any:
    """Frame of one color, which each codec keeps, with a bright left half."""
    pixels = np.full((*SIZE[::-1], 3), 15 * number, np.uint8)
    pixels[:, : SIZE[0] // 2] = 255
    return pixels


def animation(form: str, durations: Any = 100, count: int = COUNT, **options: Any) -> bytes:
    first, *others = [Image.fromarray(flat(number)) for number in range(count)]
    file = io.BytesIO()
    first.save(file, form, save_all=True, append_images=others, duration=durations, **options)
    return file.getvalue()


def movie(form: str = "mp4") -> bytes:
    av = pytest.importorskip("av", reason="PyAV is not installed")
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(FORMATS[form], rate=10)
        stream.width, stream.height, stream.pix_fmt = *SIZE, "yuv420p"
        for number in range(COUNT):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(flat(number), format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def every(step: int) -> Any:
    return lambda about: range(0, about["total_num_frames"], step)


def refusal(data: bytes, sample: Any = every(1)) -> str:  # noqa: B008
    with pytest.raises(RequestError) as failed:
        decode_video(Video(data, PLACE), sample)
    assert failed.value.code == "invalid_row" and str(failed.value).startswith(PLACE)
    return str(failed.value)


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP", *FORMATS])
def test_frames_that_are_chosen(form: str) -> None:
    """Guards the frames that are taken: those with the chosen numbers, also twice; and what is said of all."""
    data = movie(form) if form in FORMATS else animation(form, **({"lossless": True} if form == "WEBP" else {}))
    asked: list[Any] = []

    def sample(about: dict[str, Any]) -> Any:
        asked.append(dict(about))
        return np.array([0, 5, 5, 11])

    pixels, about = decode_video(Video(data, PLACE), sample)
    assert asked == [{"total_num_frames": COUNT, "fps": 10.0, "duration": COUNT / 10}]
    assert about == {**asked[0], "frames_indices": [0, 5, 5, 11]}
    wanted = np.stack([flat(number) for number in about["frames_indices"]]).astype(int)
    assert pixels.shape == wanted.shape and np.abs(pixels - wanted)[:, :, [8, 40]].max() < 6
    if form == "PNG":
        assert (pixels == wanted).all()


def test_speed_of_an_animation() -> None:
    """Guards times of frames: durations differ, and a frame without one is shown for a tenth of a second."""
    _, about = decode_video(Video(animation("GIF", [100, 300, 50, 150], 4), PLACE), every(1))
    assert about["fps"] == pytest.approx(4 / 0.6)
    _, about = decode_video(Video(animation("GIF", 0, 5), PLACE), every(1))
    assert about["fps"] == pytest.approx(10)


def test_a_video_of_a_phone_is_turned() -> None:
    """Guards videos that lie on their side in the file, which says so."""
    data = movie()
    place = data.index(b"tkhd") + 44
    assert struct.unpack(">9i", data[place : place + 36]) == (65536, 0, 0, 0, 65536, 0, 0, 0, 1 << 30)
    quarter = struct.pack(">9i", 0, 65536, 0, -65536, 0, 0, 0, 0, 1 << 30)
    pixels, _ = decode_video(Video(data[:place] + quarter + data[place + 36 :], PLACE), every(4))
    assert pixels.shape == (3, *SIZE, 3)
    assert pixels[0, 4].min() > 240 and pixels[0, -4].max() < 15, "the left side is on top"


@pytest.mark.parametrize("form", FORMATS)
def test_videos_that_are_cut_off(form: str) -> None:
    """Guards downloads that broke: fewer frames would be another video."""
    data = movie(form)
    for share in (0.02, 0.4, 0.6) if form != "mpegts" else (0.001,):  # whose end nothing announces
        said = refusal(data[: int(len(data) * share)])
        assert "cannot be decoded: it is cut off" in said or "it is damaged, or no video of the formats" in said, said


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP"])
def test_animations_that_are_cut_off(form: str) -> None:
    """Guards animations whose last frames are missing."""
    data = animation(form)
    assert "cannot be decoded: " in refusal(data[: len(data) * 2 // 3])


@pytest.mark.parametrize("text", ["", "x", "#EXTM3U\n#EXTINF:9,\nfile:{}\n", "ffconcat version 1.0\nfile {}\n"])
def test_no_other_file_is_opened(text: str, tmp_path: Path) -> None:
    """Guards files beside a list that names them, and addresses: a row may only give what lies below a folder."""
    pytest.importorskip("av", reason="PyAV is not installed")
    (tmp_path / "secret.mp4").write_bytes(movie())
    said = refusal(text.format(tmp_path / "secret.mp4").encode())
    assert "it is empty" in said or "no video of the formats mov,mp4" in said


def test_what_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory: of frames and pixels there is a bound; and what a processor raises is said of the row."""
    data = animation("GIF")
    assert "gives 769 frames, and there may be 768" in refusal(data, lambda _: [0] * 769)
    assert "gives 0 frames" in refusal(data, lambda _: [])
    assert "it ends before frame 13" in refusal(data, lambda _: [12])
    assert "cannot be sampled, of 12 frames: ZeroDivisionError" in refusal(data, lambda _: [1 // 0])
    monkeypatch.setattr(decoding, "MAX_VIDEO_PIXELS", 11 * SIZE[0] * SIZE[1])
    decode_video(Video(data, PLACE), every(2))
    assert "12 frames of 48 × 32 pixels are too many" in refusal(data)
    frames = [Picture(animation("PNG", count=1), f"frame {number}") for number in range(COUNT)]
    with pytest.raises(RequestError, match="has more than 16,896 pixels"):
        decode_video(Video(b"", PLACE, frames), every(1))


def test_missing_pyav_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards users without PyAV, which is an extra: the sentence has the command that installs it."""
    from cbatch.media.child import PictureServer

    monkeypatch.setattr("cbatch.extras.find_spec", lambda package: None)
    with pytest.raises(Exception, match=r"Videos need PyAV, the package av: pip install .*\[video\]"):
        PictureServer().count(b"\0\0\0\x20ftypisom" + bytes(99))
    assert PictureServer().count(animation("GIF"))[0] == COUNT


def content(*parts: dict[str, Any]) -> Request:
    made = Request()
    fill_row(made, {"messages": [{"role": "user", "content": [*parts]}]})
    return made


def test_each_way_to_give_a_video(tmp_path: Path) -> None:
    """Guards the forms of vLLM, transformers and Qwen: the same bytes, and names by their places."""
    data = animation("GIF")
    (tmp_path / "a.gif").write_bytes(data)
    encoded = as_given(data)["bytes"]
    made = content(
        {"type": "video_url", "video_url": {"url": f"data:video/gif;base64,{encoded}"}},
        {"type": "video_url", "video_url": "a.gif"},
        {"type": "image", "path": "a.gif"},
        {"type": "video", "video": "a.gif"},
        {"type": "video", "url": (tmp_path / "a.gif").as_uri()},
        {"type": "video", "path": "a.gif"},
        {"type": "video", "base64": encoded},
        {"type": "video", "video": ["a.gif", {"bytes": encoded, "path": None}], "fps": 4},
    )
    media = MediaSources(str(tmp_path))
    pictures = [(media.video if len(one) == 3 else media.picture)(*one) for one in made.given_pictures]
    assert [one.kind for one in pictures] == [part["type"] for part in made.messages[0]["content"]]  # type: ignore[index]
    assert [one.kind for one in pictures].count("video") == 7
    *files, frames = pictures
    assert {one.read() for one in files} == {data} and len({one.digest() for one in pictures}) == 3
    assert files[3].name == "video 3 of message 1 (a.gif)" and files[2].name == "image 1 of message 1 (a.gif)"
    assert [one.name for one in frames.frames] == [
        "frame 1 of video 7 of message 1 (a.gif)",
        "frame 2 of video 7 of message 1",
    ]
    assert frames.fps == 4 and all((decode_video(frames, every(1))[0][number] == flat(0)).all() for number in (0, 1))


def test_digests_of_frames() -> None:
    """Guards caches: a video differs by each frame, their order and times, and from the picture with its bytes."""
    one, two = Picture(b"1", "a"), Picture(b"2", "b")
    made = [
        one,
        Video(b"1", "a"),
        *(Video(b"", "a", frames, fps) for frames in ([one], [one, two], [two, one]) for fps in (1.0, 2.0)),
    ]
    assert len({each.digest() for each in made}) == len(made)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"video": []}, "video 1 of message 1 must have one of video_url, video, url, path, base64"),
        ({"path": "a", "url": "b"}, "video 1 of message 1 must have one of"),
        ({"path": "a.mp4", "fps": 1}, "has 'fps': the model's processor chooses the frames of a file"),
        ({"video": ["a"], "nframes": 8}, "has 'nframes': the model's"),
        ({"video": ["a"], "fps": "1"}, "fps of video 1 of message 1 must be a number above 0"),
        ({"video": ["a"], "sample_fps": -1}, "fps of video 1 of message 1 must be a number above 0"),
        ({"video": ["a"], "fps": True}, "fps of video 1 of message 1 must be a number above 0"),
    ],
)
def test_parts_that_are_refused(part: dict[str, Any], reason: str) -> None:
    """Guards what a model would see in another way than asked."""
    with pytest.raises(RequestError, match=reason):
        content({"type": "video", **part})


def test_frames_that_do_not_fit(tmp_path: Path) -> None:
    """Guards the names of frames that cannot be used: the row says which one."""
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    Image.new("RGB", (4, 6)).save(tmp_path / "b.png")
    media = MediaSources(str(tmp_path))
    with pytest.raises(RequestError, match=r"^video 1 has frames of several sizes"):
        decode_video(media.video(["a.png", "b.png"], "video 1", 2), every(1))
    with pytest.raises(RequestError, match=r"^frame 2 of video 1 \(gone.png\) cannot be read"):
        decode_video(media.video(["a.png", "gone.png"], "video 1", 2), every(1))
    with pytest.raises(RequestError, match=r"^frame 1 of video 1 \(../a.png\) cannot be used: it lies outside"):
        media.video(["../a.png"], "video 1", 2)
