"""The detok scenario on a tokenizer of single bytes."""

import orjson
import pytest
from headwater.producer.cli.app import main
from headwater.worker.bench.detok import SCENARIO, DetokSettings
from headwater.worker.bench.scenario import BenchError, run_scenario
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    # The self-check wants a word to stand before the tokens that it samples.
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    vocab = {char: index for index, char in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_bytes(orjson.dumps({"model_type": "llama"}))
    (folder / "tokenizer_config.json").write_bytes(
        orjson.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return folder


def test_the_report_compares_us_with_both_peers(model_folder):
    settings = DetokSettings(model=str(model_folder), num_tokens=1024, edge=256)
    report = run_scenario(SCENARIO, settings, repeat=2)
    assert [peer["name"] for peer in report.peers] == ["mlx-lm", "DecodeStream"]
    for side in (report.ours, *report.peers):
        assert side["host_us_per_token"] > 0
        assert side["tail_over_head"] > 0
    assert report.ratio["speedup"] > 0


def test_bytes_decoded_per_token_are_the_same_late_as_early(model_folder):
    settings = DetokSettings(model=str(model_folder), num_tokens=2048, edge=256)
    ours = run_scenario(SCENARIO, settings, repeat=1).ours
    assert ours["bytes_per_token_head"] == ours["bytes_per_token_tail"] >= 1.0


def test_a_folder_without_a_tokenizer_is_one_clear_line(tmp_path):
    with pytest.raises(BenchError, match=r"no tokenizer.json in .*: give --model"):
        run_scenario(SCENARIO, DetokSettings(model=str(tmp_path)))


def test_the_command_prints_one_json_object(model_folder, capsys):
    arguments = ["bench", "detok", "--json", "--model", str(model_folder)]
    with pytest.raises(SystemExit) as leaving:
        main([*arguments, "--repeat", "1", "--num-tokens", "512", "--edge", "256"])
    assert leaving.value.code == 0
    report = orjson.loads(capsys.readouterr().out)
    assert report["scenario"] == "detok"
    assert report["settings"]["num_tokens"] == 512


def test_the_command_prints_a_table_for_people_and_draws_it(model_folder, capsys, tmp_path):
    picture = tmp_path / "detok.png"
    arguments = ["bench", "detok", "--quick", "--repeat", "1", "--model", str(model_folder)]
    with pytest.raises(SystemExit) as leaving:
        main([*arguments, "--plot", str(picture)])
    assert leaving.value.code == 0
    assert "host_us_per_token" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
