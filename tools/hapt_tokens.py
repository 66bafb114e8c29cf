#!/usr/bin/env python3
"""Text becomes a data file for hapt, by the tokenizer of a published model (Hugging Face).

usage: hapt_tokens.py --tokenizer FOLDER --output tokens.h5 [--held-out held-out.h5] [--share 0.05] [--answers-only] FILE...
       hapt_tokens.py --tokenizer FOLDER --output tokens.h5 [...] --dataset NAME [--split train]
       hapt_tokens.py --tokenizer FOLDER --encode TEXT
       hapt_tokens.py --tokenizer FOLDER --decode < lines

FOLDER holds the tokenizer of the model (tokenizer.json). A FILE that ends in .jsonl has a document per line, an object with "text", with
"messages" for the chat template of the tokenizer, or with "prompt" and "completion"; any other file is one document of UTF-8 text. --dataset
is a dataset of Hugging Face's library datasets, by its name or the folder of save_to_disk, with these fields. The token that ends a text
follows each document. --answers-only: of chats only the messages of the assistant count for the loss, of pairs the completions; the rest is
context. Texts count as a whole. --held-out: about --share of the documents, evenly spaced, go to a second file for --validation-data; the end of the text, if there
is one document only.

--encode prints the tokens of a text as "5,17,3", for hapt generate --prompt-tokens; as in training data, no token that begins a text is
added. --decode reads such lines, which hapt generate prints, and
prints their texts.

The output is /tokens [n], uint32, in the order of the documents; with --answers-only also /targets [n]: the token after each one, or -100 if
that one does not count. hapt draws rows from it by seed and step, or in epochs. Needs h5py and tokenizers; "messages" need transformers."""
import argparse
import json
import os
import sys

BLOCK = 1 << 20  # tokens that are kept before they are written


def fail(text, hint):
    sys.exit("hapt_tokens: error: %s\nhint: %s" % (text, hint))


try:
    from tokenizers import Tokenizer
except ImportError as missing:
    fail(str(missing), "python3 -m pip install tokenizers")
try:
    import h5py
    import numpy
except ImportError:
    h5py = None


def need_h5py():
    if h5py is None:
        fail("data files need h5py", "python3 -m pip install h5py")


IGNORED = -100  # a target that does not count


def document(entry, where):
    """The text, the list of messages, or the pair of prompt and completion of an entry."""
    if isinstance(entry, dict):
        if isinstance(entry.get("prompt"), str) and isinstance(entry.get("completion"), str):
            return entry["prompt"], entry["completion"]
        for found in (entry.get("text"), entry.get("messages")):
            if isinstance(found, str) or (isinstance(found, list) and all(isinstance(one, dict) for one in found)):
                return found
    fail("%s has neither \"text\" nor \"messages\", nor \"prompt\" and \"completion\"" % where, "rename the fields that hold the text")


def entries(name, split):
    """The documents of a dataset of Hugging Face."""
    try:
        import datasets
    except ImportError as missing:
        fail(str(missing), "--dataset needs the library: python3 -m pip install datasets")
    found = datasets.load_from_disk(name) if os.path.isdir(name) else datasets.load_dataset(name, split=split)
    if isinstance(found, dict):
        if split not in found:
            fail("%s has no split %s" % (name, split), "it has " + ", ".join(found))
        found = found[split]
    for number, entry in enumerate(found):
        yield document(entry, "%s, entry %d" % (name, number))


def documents(path):
    """The documents of a file."""
    with open(path, encoding="utf-8") as file:
        if not path.endswith(".jsonl"):
            yield file.read()
            return
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except ValueError as error:
                fail("%s, line %d: %s" % (path, number, error), "each line of a .jsonl file is a JSON object")
            yield document(entry, "%s, line %d" % (path, number))


class Words:
    """The tokenizer of a folder."""

    def __init__(self, folder):
        path = os.path.join(folder, "tokenizer.json")
        if not os.path.exists(path):
            fail("%s does not exist" % path, "save the tokenizer with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)")
        self.folder, self.tokenizer, self.chat = folder, Tokenizer.from_file(path), None
        self.end = self.find_end()
        self.inside = 0  # documents that have the token that ends them elsewhere, too

    def find_end(self):
        """The token that ends a text, by the tokenizer's settings or the model's; None: there is none."""
        for name, key in (("tokenizer_config.json", "eos_token"), ("generation_config.json", "eos_token_id"), ("config.json", "eos_token_id")):
            path = os.path.join(self.folder, name)
            value = json.load(open(path, encoding="utf-8")).get(key) if os.path.exists(path) else None
            value = value.get("content") if isinstance(value, dict) else value[0] if isinstance(value, list) and value else value
            value = self.tokenizer.token_to_id(value) if isinstance(value, str) else value
            if isinstance(value, int):
                return value
        return None

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def apply(self, messages, answer_follows=False):
        if self.chat is None:
            try:
                from transformers import AutoTokenizer
            except ImportError as missing:
                fail(str(missing), "chat messages need transformers: python3 -m pip install transformers")
            self.chat = AutoTokenizer.from_pretrained(self.folder)
        return list(self.chat.apply_chat_template(messages, tokenize=True, return_dict=False, add_generation_prompt=answer_follows))

    def answers(self, messages, found):
        """Which tokens of a chat the assistant says: those that follow the beginning of its turn, up to the end of the turn."""
        counts = [False] * len(found)
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before, after = self.apply(messages[:number], True), self.apply(messages[:number + 1])
            if found[:len(after)] != after or after[:len(before)] != before:
                fail("the chat template changes earlier messages, so that answers cannot be found", "split such chats into one answer each")
            counts[len(before):len(after)] = [True] * (len(after) - len(before))
        return counts

    def tokens(self, document, answers_only):
        """The tokens of a document, and which of them count."""
        if isinstance(document, str):
            found = self.encode(document)
            counts = [True] * len(found)
        elif isinstance(document, tuple):
            prompt, completion = map(self.encode, document)
            found, counts = prompt + completion, [False] * len(prompt) + [True] * len(completion)
        else:
            found = self.apply(document)
            counts = self.answers(document, found) if answers_only else [True] * len(found)
        if self.end is not None and (not found or found[-1] != self.end):
            counts = counts + [bool(counts) and counts[-1]]
            found = list(found) + [self.end]
        self.inside += self.end in found[:-1]
        return found, counts


class Stream:
    """/tokens of a new file, and /targets if some do not count, written in blocks; it appears under its name when it is complete."""

    def __init__(self, path, answers_only):
        self.path, self.partial, self.kept, self.wanted, self.count = path, path + ".partial", [], [], 0
        self.file = h5py.File(self.partial, "w")
        self.tokens = self.file.create_dataset("tokens", (0,), numpy.uint32, maxshape=(None,), chunks=(1 << 18,))
        self.targets = self.file.create_dataset("targets", (0,), numpy.int32, maxshape=(None,), chunks=(1 << 18,)) if answers_only else None

    def add(self, tokens, counts):
        """A target is the next token of the same document."""
        self.kept.extend(tokens)
        if self.targets is not None:
            self.wanted.extend(token if counted else IGNORED for token, counted in zip(tokens[1:], counts[1:]))
            self.wanted.extend([IGNORED] * (len(tokens) > 0))
        if len(self.kept) >= BLOCK:
            self.write()

    def write(self):
        for dataset, values in ((self.tokens, self.kept), (self.targets, self.wanted)):
            if dataset is not None:
                dataset.resize((self.count + len(self.kept),))
                dataset[self.count:] = numpy.array(values, dataset.dtype)
        self.count, self.kept, self.wanted = self.count + len(self.kept), [], []

    def remove_partial(self):
        """After a failure."""
        self.file.close()
        if os.path.exists(self.partial):
            os.remove(self.partial)

    def close(self):
        self.write()
        self.file.close()
        os.replace(self.partial, self.path)
        print("%s: %d tokens" % (self.path, self.count))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--output")
    parser.add_argument("--encode", metavar="TEXT")
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--held-out")
    parser.add_argument("--share", type=float)
    parser.add_argument("--answers-only", action="store_true")
    parser.add_argument("--dataset")
    parser.add_argument("--split")
    parser.add_argument("file", nargs="*")
    options = parser.parse_args()
    if (options.output is not None) + (options.encode is not None) + options.decode != 1:
        fail("give one of --output, --encode and --decode", "hapt_tokens.py --help")
    if bool(options.file or options.dataset) != bool(options.output) or (options.file and options.dataset):
        fail("--output needs a FILE or --dataset, the others take none", "hapt_tokens.py --help")
    if options.split and not options.dataset:
        fail("--split has no effect without --dataset", "hapt_tokens.py --help")
    if not options.output and (options.held_out or options.share is not None or options.answers_only):
        fail("--held-out, --share and --answers-only need --output", "hapt_tokens.py --help")
    if options.encode is not None:
        print(",".join(map(str, Words(options.tokenizer).tokenizer.encode(options.encode, add_special_tokens=False).ids)))
        return
    if options.decode:
        decode(Words(options.tokenizer))
        return
    need_h5py()
    options.share = 0.05 if options.share is None else options.share
    if not 0 < options.share < 1:
        fail("--share %g is not between 0 and 1" % options.share, "0.05 is one document of twenty")
    for path in filter(None, (options.output, options.held_out)):
        if os.path.exists(path):
            fail("%s exists" % path, "remove it, or give another name")
    streams = [Stream(path, options.answers_only) for path in (options.output, options.held_out) if path]
    try:
        write(options, Words(options.tokenizer), streams)
    finally:
        for stream in streams:
            stream.remove_partial()


def tell_end(words):
    if words.inside:  # as the ends of turns in many chat templates
        print("token %d ends documents, and stands inside %d of them: hapt import --document-end %d would divide these" %
              (words.end, words.inside, words.end))
    elif words.end is not None:
        print("token %d ends each document: hapt import --document-end %d keeps documents of a row apart" % (words.end, words.end))


def decode(words):
    for line in sys.stdin:
        try:
            print(words.tokenizer.decode([int(token) for token in line.split(",")]))
        except (ValueError, OverflowError):
            fail("\"%.40s\" is no list of tokens" % line.strip(), "lines look like 5,17,3")


def write(options, words, streams):
    """Each document goes to the first stream, or to the second one, if there is one and its share is due. If none was due, the last one goes there."""
    due, number, last, any_held_out = 0.0, 0, None, False

    def place(tokens, counts):
        nonlocal due, any_held_out
        due += options.share if len(streams) > 1 else 0
        held_out = due >= 1
        due -= held_out
        any_held_out |= held_out
        streams[held_out].add(tokens, counts)

    sources = [entries(options.dataset, options.split or "train")] if options.dataset else map(documents, options.file)
    for found in sources:
        for one in found:
            number += 1
            if last:
                place(*last)
            last = words.tokens(one, options.answers_only)
    if number > 1 and (any_held_out or len(streams) == 1):
        place(*last)
    elif number > 1:
        streams[1].add(*last)
    elif number == 1:
        tokens, counts = last
        end = len(tokens) - (max(1, int(options.share * len(tokens))) if len(streams) > 1 else 0)
        streams[0].add(tokens[:end], counts[:end])
        if len(streams) > 1:
            streams[1].add(tokens[end:], counts[end:])
    for stream in streams:
        if not stream.kept and not stream.count:
            fail("%s would be empty: %d documents" % (stream.path, number), "give more text, or a larger --share")
    for stream in streams:
        stream.close()
    if number > 1:
        tell_end(words)


main()
