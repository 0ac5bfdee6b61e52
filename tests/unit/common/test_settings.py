"""Settings of a process: order of sources, and one sentence for every mistake."""

from __future__ import annotations

import pytest

from services.common.settings import ServiceSettings, SettingsError, build_settings, parse_settings


class Settings(ServiceSettings):
    port: int = 5000
    """gRPC port."""
    name: str = "x"
    """A name."""


def build(*argv: str) -> Settings:
    return build_settings(Settings, list(argv), "TETRARCH_TEST_")


def test_command_line_wins_over_environment_wins_over_file(tmp_path, monkeypatch) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("port: 1\nname: file\nlog_level: debug\n")
    monkeypatch.setenv("TETRARCH_TEST_PORT", "2")
    monkeypatch.setenv("TETRARCH_TEST_NAME", "env")
    settings = build("--config", str(config), "--set", "port=3")
    assert (settings.port, settings.name, settings.log_level) == (3, "env", "debug")


@pytest.mark.parametrize(
    ("argv", "fragment"),
    [
        (["--set", "nam=y"], "Unknown key 'nam'. Did you mean 'name'?"),
        (["--set", "port=abc"], "port is 'abc'"),
        (["--set", "port"], "has no '='"),
        (["--port", "3"], "Unknown or incomplete argument '--port'"),
        (["--config", "/nowhere.yaml"], "Cannot read /nowhere.yaml"),
    ],
)
def test_mistakes_are_one_sentence(argv: list[str], fragment: str) -> None:
    with pytest.raises(SettingsError) as caught:
        build(*argv)
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_environment_setting_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("TETRARCH_TEST_PROT", "1")
    with pytest.raises(SettingsError, match="TETRARCH_TEST_PROT"):
        build()


def test_bad_yaml_names_the_line(tmp_path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("port: 1\nname: [\n")
    with pytest.raises(SettingsError, match=r"c\.yaml:3"):
        build("--config", str(config))


def test_a_mistake_ends_the_process_with_2(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_settings(Settings, ["--set", "nam=1"], prog="tetrarch-test", env_prefix="TETRARCH_TEST_")
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("tetrarch-test: Unknown key")
