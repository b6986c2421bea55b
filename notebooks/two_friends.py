"""A year of two friends' talk, in the manner of the LoCoMo data set, and questions about it."""

from __future__ import annotations

import random

_STORIES = """
the cello
Maya rented a cello from a shop on Mill Street
Maya has cello lessons with Mrs. Okafor on Tuesdays
Maya struggles with the bow hold on the cello
Maya played a cello piece by Fauré for her mother
Maya broke a cello string before the recital
Maya gave her first cello recital in the town hall
Maya bought the cello that she had rented
Maya plays cello in a quartet now
Maya practises the cello before breakfast
Maya will play the cello at her sister's wedding

the marathon
Tom signed up for the Porto marathon
Tom runs along the river with his neighbour Inês
Tom bought running shoes with wider toes
Tom hurt his knee at kilometre 24 of a training run
Tom sees a physiotherapist for the knee on Mondays
Tom ran a half marathon in one hour and 52 minutes
Tom eats rice and eggs before long runs
Tom sleeps badly before the marathon
Tom finished the Porto marathon in four hours and six minutes
Tom wants to run the marathon in Valencia next

the dog
Maya thinks about adopting a dog
Maya visited the shelter and met a shy greyhound
Maya adopted the greyhound and calls him Biscuit
Biscuit is afraid of the vacuum cleaner
Biscuit ate a whole loaf of bread
Maya walks Biscuit in the cemetery park at six
Biscuit limped and the vet found a thorn
Biscuit stays with Tom while Maya travels
Biscuit sleeps on the sofa in spite of the rules
Biscuit learned to bring the newspaper

the clinic
Tom applied for a post at the clinic in Braga
Tom had an interview at the clinic with Dr. Sousa
Tom got the post at the clinic as head nurse
Tom works night shifts at the clinic every third week
Tom likes the clinic's garden for his breaks
The clinic got a new computer system that nobody understands
Tom trains two young nurses at the clinic
Tom argued with the clinic's director about overtime
The clinic gave Tom four days off for the race
Tom leads the clinic's team for heart patients now

the wedding
Maya's sister Lena got engaged to Paul
Lena's wedding will be in a vineyard near Pinhão
Maya is the maid of honour at the wedding
Maya chose a green dress for the wedding
The wedding's band cancelled
Tom knows a jazz trio that could play at the wedding
Lena wants 80 guests at the wedding
Maya writes a speech for the wedding
It rained in the morning of Lena's wedding
Maya danced until three at the wedding

pottery
Tom goes to a pottery class on Thursdays
Tom's first pottery bowl collapsed on the wheel
Tom glazed a pottery mug in blue for Maya
The pottery teacher Renato was a sailor
Tom's pottery kiln opened with three cracked plates
Tom sells pottery at the Christmas market
Tom made pottery place cards for Lena's wedding
Tom dropped the pottery vase for his mother
Tom built pottery lamps for the clinic's garden
Tom shares a pottery studio with Renato now

the flat
Maya looks for a flat with a balcony
Maya saw a flat above a bakery that smelled of bread
Maya signed the lease for the flat in Rua das Flores
The flat's heating broke in the first week
Tom helped Maya to paint the flat's kitchen yellow
The flat's neighbour Mr. Dias complains about the cello
Maya put tomatoes and basil on the flat's balcony
Maya's rent for the flat went up by 40 euros
Maya found a flatmate called Sofia
Sofia moved into the flat with a piano

cooking
Tom learns to cook Thai food from a video course
Tom's first green curry was too hot to eat
Tom grows lemongrass for cooking
Maya and Tom cook together on the first Sunday of a month
Maya is allergic to peanuts, so Tom cooks pad thai without them
Tom burned the rice while cooking for Dr. Sousa
Tom's cooking friends meet at Inês's place
Maya brought a mortar from Bangkok for Tom's cooking
Tom cooked massaman curry for the whole clinic
Tom thinks about a cooking stall at the market
"""
_ASIDES = """
It was the best part of the week, and there was a lot to laugh about afterwards.
It took longer than planned, as such things do, but nobody was cross in the end.
There will be pictures of it as soon as the phone is mended again.
It is still a secret at work, so please do not tell anyone yet.
It was in the news here, too, with a photo on the second page.
A year ago nobody would have believed it, least of all the family.
"""
_MONTHS = """
January
February
March
April
May
June
July
September
October
December
"""
_QUESTIONS = """
Who teaches Maya the cello?
What did Tom break his knee with?
What is Maya's dog called?
When did Tom finish the marathon in Porto?
Where will Lena's wedding be?
Who complains about the cello?
What does Tom eat before long runs?
What is Biscuit afraid of?
Who interviewed Tom at the clinic?
Which dress did Maya choose for the wedding?
Who was a sailor before he taught pottery?
Where is Maya's flat?
What is Maya allergic to when Tom cooks?
What did Biscuit eat?
When did Maya give her cello recital?
How many guests does Lena want at the wedding?
Who moved into the flat with a piano?
What did Tom make for Lena's wedding in the pottery class?
Which knee treatment does Tom get on Mondays?
Where did Maya rent the cello?
Who runs along the river with Tom?
What did the vet find when Biscuit limped?
Which marathon does Tom want to run next?
What colour is the kitchen of Maya's flat?
How often does Tom work night shifts at the clinic?
Which piece did Maya play on the cello?
What happened to Tom's first pottery bowl?
Who plays at the wedding after the band cancelled?
What did Tom cook for the whole clinic?
When do Maya and Tom cook together?
Who looks after Biscuit while Maya travels?
How much did the rent for the flat go up?
Which system did the clinic get?
How long did Tom need for the half marathon?
What did Maya bring from Bangkok for cooking?
What was the weather at Lena's wedding?
Where does Tom sell his pottery?
Does Maya own the cello now?
Where does Biscuit sleep?
What does Tom lead at the clinic now?
"""


def turns_of_two_friends() -> list[str]:
    """Return 160 turns of Maya's and Tom's ten sessions; in each, eight stories go on."""
    stories = [story.splitlines() for story in _STORIES.strip().split("\n\n")]
    asides = _ASIDES.strip().splitlines()
    draw = random.Random(7)
    turns = []
    for session, month in enumerate(_MONTHS.split(), start=1):
        for story in draw.sample(stories, len(stories)):
            day = draw.randint(1, 28)
            other = draw.choice(["Maya", "Tom"])
            told = f"{other} was glad to hear of it, and asked more about {story[0]}"
            turns.append(f"{day} {month}: {story[session]}. {draw.choice(asides)}")
            turns.append(f"{day} {month}: {told}. {draw.choice(asides)}")
    return turns


def questions_about_them() -> list[str]:
    """Return 40 questions in the order in which they are asked."""
    return _QUESTIONS.strip().splitlines()
