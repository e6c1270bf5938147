"""Vision transformers on photos: what they saw, what they attended to, and how it is laid over the picture."""

import json

import matplotlib as mpl
import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

import attnscope
from attnscope.drawing.cells import MIN_BRIGHTNESS, overlay
from attnscope.errors import AttnscopeError
from attnscope.questions.heatmap import Heatmap
from attnscope.questions.heatmap_figures import find_query, weigh_keys, weigh_patches
from attnscope.senses import photos
from attnscope.senses.photos import read_photo
from tests.record_helpers import require_lossless, require_read, stems
from tests.senses_helpers import dense_float64, photo, write_vision

ARCHITECTURES = {
    "vit": ("vit", {}, ("CLS",)),
    "deit": ("deit", {}, ("CLS", "DIST")),
    "dinov2": ("dinov2", {"use_swiglu_ffn": True}, ("CLS",)),
    "registers": ("dinov2_with_registers", {"num_register_tokens": 2}, ("CLS", "REG0", "REG1")),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("vision")
    return {
        name: write_vision(home / name, kind, **more) for name, (kind, more, _) in ARCHITECTURES.items()
    }


@pytest.fixture(scope="module")
def vit(folders):
    return attnscope.load(folders["vit"])


@pytest.fixture(scope="module")
def record(vit):
    return attnscope.picture_heatmap(vit, photo())


@pytest.fixture
def run(run, monkeypatch):
    """Runs the command in this process, standing in a folder of its own that holds a photo."""
    monkeypatch.setenv("COLUMNS", "100")
    Image.fromarray(photo()).save("photo.png")
    return run


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_are_those_of_eager_attention_in_float64(name, folders):
    model = attnscope.load(folders[name])
    assert (model.info.path, model.info.kinds, model.info.checked) == ("seam", ("encoder",), True)
    made = attnscope.picture_heatmap(model, photo())
    before = ARCHITECTURES[name][2]
    assert made.tokens[: len(before) + 4] == (*before, "0,0", "0,1", "0,2", "1,0")
    assert made.maps[0].keys.special.tolist() == [True] * len(before) + [False] * 9
    assert model.image_reader is not None
    true = dense_float64(
        folders[name], model.image_reader.prepare_photo(read_photo(photo())).inputs["pixel_values"]
    )
    assert made.weights.shape == (2, 4, len(before) + 9, len(before) + 9)
    assert float(np.ptp(made.weights)) > 0.3  # flat maps would agree with anything
    np.testing.assert_allclose(made.weights, np.stack(true), atol=2e-5)


def test_the_picture_is_what_the_model_saw(record, vit):
    assert record.picture is not None
    expected = np.asarray(Image.fromarray(photo()).resize((24, 24), Image.Resampling.BILINEAR)).astype(
        int
    )
    assert np.abs(record.picture.pixels.astype(int) - expected).max() <= 1
    assert record.picture.grid == (3, 3)
    assert record.picture.patch == (8, 8)
    assert record.picture.size == (60, 40)
    seen = (
        vit.image_reader.prepare_photo(read_photo(photo()))
        .inputs["pixel_values"]
        .numpy()[0]
        .transpose(1, 2, 0)
    )
    again = (record.picture.pixels / 255 - [0.5, 0.4, 0.6]) / [0.5, 0.25, 0.2]
    np.testing.assert_allclose(seen, again, atol=0.5 / 255 / 0.2 + 1e-5)


def test_records_are_read_back_without_loss(record, tmp_path):
    require_lossless(record, tmp_path)


def test_a_record_whose_picture_does_not_fit_is_refused(record, tmp_path):
    told = record.describe()
    for grid, refused in (
        ([5, 3], "does not fit its patches"),
        ([1, 3], "not the patches of its picture"),
    ):
        picture = {**told["options"]["picture"], "grid": grid}
        wrong = {**told, "options": {**told["options"], "picture": picture}}
        with pytest.raises(ValueError, match=refused):
            require_read(Heatmap, wrong, record.arrays())


# Drawing ------------------------------------------------------------------------------------------------------------


def test_a_patch_is_a_square_of_its_colour_shaded_by_the_photo(record):
    picture = record.picture
    cmap = mpl.colormaps["Blues"]
    assert picture is not None
    patches = np.arange(9.0).reshape(3, 3)
    made = overlay(picture.pixels, patches, cmap, 8.0)
    assert made.shape == (24, 24, 3)
    grey = picture.pixels / 255 @ [0.2126, 0.7152, 0.0722]
    for y in range(24):
        for x in range(24):
            colour = np.array(cmap(patches[y // 8, x // 8] / 8)[:3])
            expected = 255 * colour * (MIN_BRIGHTNESS + (1 - MIN_BRIGHTNESS) * grey[y, x])
            np.testing.assert_allclose(made[y, x], expected, atol=0.51)


def test_queries_are_named_by_place_and_by_name(record):
    attention = record.maps[0]
    assert find_query(attention, None) == find_query(attention, "cls") == (0, "CLS")
    assert find_query(attention, "2, 1")[0] == 1 + 2 * 3 + 1 == find_query(attention, "@8")[0]
    assert find_query(attention, "mean")[0] == -1
    with pytest.raises(AttnscopeError, match="no patch is '3,0'") as error:
        find_query(attention, "3,0")
    assert "from 0,0 to 2,2" in error.value.hint
    np.testing.assert_allclose(
        weigh_keys(attention, (1, 2), -1), record.of(1, 2)[1:].astype(float).mean(0)
    )
    np.testing.assert_array_equal(weigh_patches(record, (1, 2), 8).ravel(), record.of(1, 2)[8, 1:])


def test_sheets_and_files(record, tmp_path):
    assert stems(record) == ["overview-CLS", "L00-CLS", "L01-CLS"]
    assert stems(record.only([(1, 2), (0, 3)]), "2,1") == ["picked-2-1"]
    hidden = record.hide_special()
    assert stems(hidden)[0] == "overview-mean"
    hidden.draw(tmp_path / "hidden")


# Photos -------------------------------------------------------------------------------------------------------------


def test_photos_of_many_kinds(tmp_path):
    plain = Image.fromarray(photo(6, 10))
    plain.convert("CMYK").save(tmp_path / "cmyk.tiff")
    plain.convert("L").save(tmp_path / "grey.png")
    clear = plain.convert("RGBA")
    clear.putpixel((0, 0), (1, 2, 3, 0))
    clear.save(tmp_path / "clear.png")
    turned = Image.Exif()
    turned[0x0112] = 6
    plain.save(tmp_path / "turned.jpg", exif=turned, quality=100, subsampling=0)
    plain.save(
        tmp_path / "moving.gif",
        save_all=True,
        append_images=[plain.transpose(Image.Transpose.ROTATE_180)],
    )
    for name in ("cmyk.tiff", "grey.png", "clear.png", "turned.jpg", "moving.gif"):
        assert read_photo(tmp_path / name).image.mode == "RGB"
    assert read_photo(tmp_path / "clear.png").image.getpixel((0, 0)) == (255, 255, 255)
    upright = read_photo(tmp_path / "turned.jpg")
    assert upright.image.size == (6, 10)
    corner = np.array(upright.image.getpixel((5, 0)), int)  # upper left as it was stored
    assert np.abs(corner - photo(6, 10)[0, 0]).max() < 25
    moving = read_photo(tmp_path / "moving.gif")
    assert np.abs(np.asarray(moving.image).astype(int) - photo(6, 10)).mean() < 20


def test_what_is_no_photo_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("no picture", "utf-8")
    Image.fromarray(np.full((4, 5), 257 * 100, np.uint16)).save(tmp_path / "deep.png")
    Image.fromarray(photo(200, 200)).save(tmp_path / "whole.png")
    # It is known by its content, whatever it is called.
    Image.fromarray(photo(20, 20)).save(tmp_path / "program.png", format="EPS")
    monkeypatch.setattr(
        EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("a program was started")
    )
    (tmp_path / "half.png").write_bytes((tmp_path / "whole.png").read_bytes()[:600])
    for given, said in (
        (tmp_path / "empty.png", "is empty"),
        (tmp_path / "text.png", "cannot be read as a picture"),
        (tmp_path / "program.png", "give a photo: PNG, JPEG, WebP, GIF, TIFF or BMP"),
        (tmp_path / "deep.png", "greys of more than 8 bits"),
        (tmp_path / "half.png", "cannot be read as a picture"),
        (tmp_path / "none.png", "there is no file"),
        (tmp_path, "is a folder"),
        (np.zeros((3, 4), np.float32), "is no picture"),
        (17, "int is no picture"),
    ):
        with pytest.raises(AttnscopeError, match=said) as error:
            read_photo(given)
        assert "\n" not in str(error.value)
    monkeypatch.setattr(photos, "MAX_PIXELS", 39_999)
    with pytest.raises(AttnscopeError, match="200 x 200"):
        read_photo(tmp_path / "whole.png")


# Models that see no pictures, and pictures without models -------------------------------------------------------------


def test_models_in_memory(folders):
    from transformers import AutoImageProcessor, AutoModel

    inner = AutoModel.from_pretrained(folders["vit"])
    processor = AutoImageProcessor.from_pretrained(folders["vit"], backend="pil")
    made = attnscope.picture_heatmap(attnscope.load(inner, processor), photo(), pick=[(1, 2)])
    whole = attnscope.picture_heatmap(attnscope.load(folders["vit"]), photo())
    np.testing.assert_allclose(made.of(1, 2), whole.of(1, 2), atol=1e-6)
    with pytest.raises(AttnscopeError, match="without its image processor"):
        attnscope.picture_heatmap(attnscope.load(inner), photo())


# The command line ---------------------------------------------------------------------------------------------------


def test_heatmap_draws_and_show_draws_again(run, folders, tmp_path):
    folder = str(folders["vit"])
    status, out, err = run(
        "heatmap", "--image", "photo.png", "-m", folder, "-f", "png,npz,json", "-o", "a"
    )
    assert status == 0
    assert err == ""
    stems = ["overview-CLS", "L00-CLS", "L01-CLS"]
    assert out.split()[-5:] == [*(f"a/{stem}.png" for stem in stems), "a/heatmap.npz", "a/heatmap.json"]
    status, out, _ = run("show", "a", "-o", "b")
    assert out.split() == [f"b/{stem}.png" for stem in stems]
    for stem in stems:
        assert (tmp_path / "a" / f"{stem}.png").read_bytes() == (
            tmp_path / "b" / f"{stem}.png"
        ).read_bytes()
    status, out, _ = run("show", "a", "--query", "1,2", "--pick", "L1H0")
    assert status == 0
    assert "what patch 1,2 attends to" in " ".join(out.split())
    assert "3 × 3 patches" in out
    status, out, _ = run(
        "heatmap", "--image", "photo.png", "-m", folder, "--json", "-f", "npz", "--pick", "L0H1"
    )
    document = json.loads(out)
    assert document["options"]["picture"] == {
        "grid": [3, 3],
        "source": "photo.png",
        "size": [60, 40],
        "area": None,
    }
    assert np.array(document["pixels"]).shape == (24, 24, 3)


def test_rollout_follows_patches_through_layers(run, folders, record):
    status, out, _ = run(
        "heatmap", "--rollout", "--image", "photo.png", "-m", str(folders["vit"]), "-o", "r"
    )
    assert status == 0
    assert out.split()[-4:] == ["r/rollout.npz", "r/overview-CLS.png", "r/L00-CLS.png", "r/L01-CLS.png"]
    found = attnscope.load_record("r/rollout.npz")
    first, second = (
        0.5 * layer.astype(np.float64).mean(0) + 0.5 * np.eye(10) for layer in record.weights
    )
    np.testing.assert_allclose(found.rollout[1], second @ first, atol=1e-6)
    assert found.picture is not None
    assert found.picture.grid == (3, 3)
